"""A sidecar as a process, and what the tests wait with: every wait is on a queue and has a deadline."""
import json
import os
import queue
import signal
import subprocess
import tempfile
import threading
import unittest
import urllib.request

from aep_sdk import ControlTarget, Emitter, http_sink, open_duplex, subscribe

# The longest that a test waits for something that must happen, in seconds.
PATIENCE = 60
TOKEN = "sdk-test-token"


class Sidecar:
    """The binary that AEP_SIDECAR_BIN names, with nothing in its environment but `variables`."""

    def __init__(self, directory, **variables):
        environment = {"AEP_PORT": "0", "AEP_LOG_FORMAT": "json", **variables}
        self.process = subprocess.Popen(
            [os.environ["AEP_SIDECAR_BIN"]],
            cwd=directory, env=environment,
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        )
        self.log = []
        listening = queue.Queue()
        self._reader = threading.Thread(target=self._read, args=(listening,), daemon=True)
        self._reader.start()
        self.address = taken(listening)
        if self.address is None:
            raise AssertionError("the sidecar never listens, but says:\n" + "".join(self.log))
        self.port = self.address.rpartition(":")[2]
        self.url = f"http://{self.address}"

    def _read(self, listening):
        for line in self.process.stderr:
            self.log.append(line)
            try:
                entry = json.loads(line)
            except ValueError:
                continue
            if entry.get("message") == "listening":
                listening.put(entry["address"])
        listening.put(None)

    def stop(self):
        """Stops it in order; it must exit with 0."""
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(PATIENCE)
        self._reader.join(PATIENCE)
        self.process.stderr.close()
        if code != 0:
            raise AssertionError(f"exit code {code}:\n" + "".join(self.log))

    def kill(self):
        """Ends it without a word, if it still runs."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self._reader.join(PATIENCE)
        self.process.stderr.close()


def emitter(sidecar, agent="sdk", token=None, **options):
    """The SDK's emitter over HTTP. An event that isn't taken fails the test."""

    def refused(error):
        raise error

    return Emitter(agent, "test", http_sink(sidecar.url, token, on_error=refused), **options)


def ids(events):
    return [event["id"] for event in events]


def taken(from_queue):
    try:
        return from_queue.get(timeout=PATIENCE)
    except queue.Empty:
        raise AssertionError(f"nothing came within {PATIENCE} s") from None


def within(call, *arguments, **keywords):
    """What `call` returns or raises. A call that never comes back fails the test."""
    outcome = queue.Queue()

    def run():
        try:
            outcome.put((call(*arguments, **keywords), None))
        except BaseException as error:
            outcome.put((None, error))

    threading.Thread(target=run, daemon=True).start()
    result, error = taken(outcome)
    if error is not None:
        raise error
    return result


class Subscriber:
    """The SDK's SSE subscription, whose callbacks fill queues."""

    def __init__(self, url, *, wait=True, **options):
        self.events, self.comments, self.errors = queue.Queue(), queue.Queue(), queue.Queue()
        self.subscription = subscribe(
            url, self.events.put, on_comment=self.comments.put, on_error=self.errors.put,
            **{"backoff_initial_ms": 10, "backoff_max_ms": 100, **options},
        )
        if wait:
            self.attached()

    def attached(self):
        """Waits until the relay has answered: the first thing that it says is a comment."""
        self.comment("ping")

    def comment(self, wanted):
        while taken(self.comments) != wanted:
            pass

    def until(self, last):
        """The ids of the events that come, up to the event `last`."""
        ids = []
        while last["id"] not in ids:
            ids.append(taken(self.events)["id"])
        return ids

    def close(self):
        self.subscription.close()


class Wire:
    """`GET path` as raw bytes: the `data:` fields of a stream in a queue, and `None` at its end."""

    def __init__(self, sidecar, path, token=None):
        headers = {"authorization": f"Bearer {token}"} if token else {}
        self.response = urllib.request.urlopen(
            urllib.request.Request(sidecar.url + path, headers=headers), timeout=PATIENCE)
        self.data = queue.Queue()
        # The answer comes after the subscription has begun.
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self):
        try:
            for line in self.response:
                if line.startswith(b"data: "):
                    self.data.put(line[len(b"data: "):].rstrip(b"\n"))
        except (OSError, ValueError):
            # The sidecar's end, or the test's.
            pass
        self.data.put(None)

    def all(self):
        """Everything until the end."""
        return list(iter(lambda: taken(self.data), None))


class Connection:
    """The SDK's WebSocket with `hello` exchanged, and a queue of what the relay sends."""

    def __init__(self, sidecar, role, *, token=None, agent="sdk", capabilities=None):
        self.duplex = within(open_duplex, sidecar.url, token=token)
        self.received = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()
        self.send({
            "type": "hello", "versions": ["0.1"], "role": role,
            "identity": {"agent": agent, "instance": "test"}, "capabilities": capabilities or {},
        })
        self.hello = self.frame("hello")

    def _read(self):
        while (message := self.duplex.recv_json()) is not None:
            self.message(message)
        self.received.put(None)

    def message(self, message):
        self.received.put(message)

    def send(self, message):
        self.duplex.send_json(message)

    def frame(self, wanted):
        """The next message of the type `wanted`."""
        before = []
        while (message := taken(self.received)) is not None:
            if message["type"] == wanted:
                return message
            before.append(message)
        raise AssertionError(f"the connection ends without {wanted}, after {before}")

    def settle(self):
        """Two round trips: what was on its way here when they began has come."""
        for _ in range(2):
            self.send({"type": "ping", "t": 1})
            self.frame("pong")

    def emitter(self, session, agent="sdk", **options):
        """The SDK's emitter of a session, over this connection."""
        return Emitter(agent, "test", self.send, **options).session(session)

    def close(self):
        self.duplex.close()


class Target(Connection):
    """A connected agent that the SDK's ControlTarget answers commands for: a cancelled run is its outcome."""

    def __init__(self, sidecar, session, *, accepts, declared=True, token=TOKEN, agent="sdk"):
        self.commands, self.executed = queue.Queue(), queue.Queue()
        self.session = self.emitter(session, agent)
        self.control = ControlTarget(self.session, accepts)
        declaration = {"emits": ["session", "run"]}
        if declared:
            declaration["control"] = {"accepts": accepts, "ack_window_ms": 10_000}
        super().__init__(sidecar, "emitter", token=token, agent=agent, capabilities=declaration)
        # What claims the session. The roster's refusal comes after it was read.
        self.started = self.session.emit("session.started")
        self.send({"type": "roster", "id": "claimed"})
        assert self.frame("error")["code"] == "unauthorized"

    def message(self, message):
        if "." not in message["type"]:
            return super().message(message)
        self.commands.put(message)
        self.control.handle(message, self._execute)

    def _execute(self, command):
        self.executed.put(command)
        if command["type"] == "control.cancel":
            self.session.emit("run.cancelled", run=command["run"], cause=command["id"])


class TestCase(unittest.TestCase):
    """A test with a directory of its own, whose sidecars and connections end with it."""

    def setUp(self):
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        self.directory = directory.name

    def sidecar(self, **variables):
        sidecar = Sidecar(self.directory, **variables)
        self.addCleanup(sidecar.kill)
        return sidecar

    def closing(self, closable):
        self.addCleanup(closable.close)
        return closable

    def nothing_more(self, target):
        """No command reaches the target beyond those that were taken from it."""
        target.settle()
        self.nothing_in(target.commands)

    def nothing_in(self, from_queue):
        self.assertEqual(list(from_queue.queue), [])
