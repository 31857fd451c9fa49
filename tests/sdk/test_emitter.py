"""The SDK's emitter: over HTTP, over WebSocket, and into a file that is exported."""
import json
import os
import subprocess
import urllib.error

from aep_sdk import Emitter, TransportError, http_sink, jsonl_sink, open_duplex
from sidecar import PATIENCE, TOKEN, Connection, Subscriber, TestCase, Wire, emitter, ids, taken, within


class OverHttp(TestCase):
    def test_what_is_emitted_is_forwarded_byte_for_byte(self):
        sidecar = self.sidecar()
        wire = Wire(sidecar, "/stream")
        sdk = emitter(sidecar)
        session = sdk.session("s")
        emitted = [
            session.emit("session.started", {"client": {"name": "bücher ✓", "version": "1.0"}}),
            session.emit("run.started", run="r", severity="notice", extensions={"tenant": "a", "shard": 7}),
            sdk.emit("agent.online"),
            session.emit("x.acme.cache.evicted", {"n": 1}),
        ]
        for event in emitted:
            self.assertEqual(taken(wire.data), json.dumps(event).encode())

    def test_a_redelivery_is_held_once(self):
        sidecar = self.sidecar()
        session = emitter(sidecar).session("s")
        emitted = [session.emit("run.progress") for _ in range(3)]
        for event in reversed(emitted):
            session.redeliver(event)
        last = session.emit("run.completed")
        held = Wire(sidecar, "/stream?live=0&from=all").all()
        self.assertEqual(ids(map(json.loads, held)), ids([*emitted, last]))

    def test_only_the_right_token_lets_it_in(self):
        sidecar = self.sidecar(AEP_TOKEN=TOKEN)
        emitter(sidecar, token=TOKEN).session("s").emit("session.started")
        for token in (None, "wrong"):
            errors = []
            Emitter("sdk", "test", http_sink(sidecar.url, token, on_error=errors.append)).session("s").emit(
                "session.started")
            self.assertEqual([error.code for error in errors], [401])

    def test_an_illegal_event_is_refused_and_told(self):
        sidecar = self.sidecar()
        with self.assertRaises(urllib.error.HTTPError) as refused:
            emitter(sidecar).session("s").emit("nonsense")
        self.assertEqual(refused.exception.code, 400)
        with refused.exception as answer:
            self.assertEqual(json.load(answer)["error"], "invalid-event")


class OverWebSocket(TestCase):
    def test_what_is_emitted_is_forwarded_byte_for_byte(self):
        sidecar = self.sidecar(AEP_TOKEN=TOKEN)
        wire = Wire(sidecar, "/stream", token=TOKEN)
        connection = self.closing(Connection(sidecar, "emitter", token=TOKEN))
        self.assertEqual(connection.hello["versions"], ["0.1"])
        session = connection.emitter("s", epoch=3)
        emitted = [session.emit("run.progress", {"message": f"ü {n}"}, run="r") for n in range(100)]
        for event in emitted:
            self.assertEqual(taken(wire.data), json.dumps(event).encode())

    def test_a_pong_says_that_what_was_sent_before_is_held(self):
        sidecar = self.sidecar()
        connection = self.closing(Connection(sidecar, "emitter"))
        session = connection.emitter("s")
        emitted = []
        for _ in range(20):
            emitted += [session.emit("run.progress") for _ in range(20)]
            connection.send({"type": "ping"})
            connection.frame("pong")
            held = Wire(sidecar, "/stream?live=0&from=all").all()
            self.assertEqual(ids(map(json.loads, held)), ids(emitted))

    def test_both_roles_on_one_connection(self):
        sidecar = self.sidecar()
        connection = self.closing(Connection(sidecar, "both"))
        connection.send({"type": "subscribe", "id": "sub", "filter": {"type": "run.*"}})
        self.assertEqual(connection.frame("subscribed")["id"], "sub")
        session = connection.emitter("s")
        session.emit("session.started")
        started = session.emit("run.started", run="r")
        self.assertEqual(connection.frame("run.started"), started)

    def test_a_large_event_fits(self):
        sidecar = self.sidecar()
        subscriber = self.closing(Subscriber(sidecar.url))
        connection = self.closing(Connection(sidecar, "emitter"))
        event = connection.emitter("s").emit("x.acme.blob.made", {"text": "ü" * 200_000})
        self.assertEqual(taken(subscriber.events), event)

    def test_an_illegal_event_is_refused_and_the_connection_lives(self):
        sidecar = self.sidecar()
        subscriber = self.closing(Subscriber(sidecar.url))
        connection = self.closing(Connection(sidecar, "emitter"))
        session = connection.emitter("s")
        bad = session.emit("Not.Legal")
        good = session.emit("session.started")
        error = connection.frame("error")
        self.assertEqual((error["code"], error["cause"]), ("invalid-event", bad["id"]))
        self.assertEqual(taken(subscriber.events), good)

    def test_a_wrong_token_is_no_connection(self):
        sidecar = self.sidecar(AEP_TOKEN=TOKEN)
        for token in (None, "wrong"):
            with self.assertRaises(TransportError) as refused:
                within(open_duplex, sidecar.url, token=token)
            self.assertEqual((refused.exception.kind, refused.exception.status), ("http", 401))


class IntoAFile(TestCase):
    def test_a_file_is_exported(self):
        path = os.path.join(self.directory, "events.jsonl")
        session = Emitter("sdk", "test", jsonl_sink(path)).session("s")
        emitted = [session.emit("run.progress", {"message": f"ü {n}"}, run="r") for n in range(20)]
        exported = subprocess.run(
            [os.environ["AEP_SIDECAR_BIN"], "export", "--from-file", path],
            cwd=self.directory, env={}, capture_output=True, text=True, timeout=PATIENCE, check=True,
        )
        got = [json.loads(line) for line in exported.stdout.splitlines()]
        self.assertEqual(ids(got), ids(emitted))
        self.assertEqual([ce["data"] for ce in got], [event["data"] for event in emitted])
        self.assertEqual({ce["type"] for ce in got}, {"dev.aep.run.progress"})
