"""The SDK's control sender and target: a command is routed once, answered by its target, and has an outcome."""
import asyncio
import json
import time
import urllib.error

from aep_sdk import ControlClient, ControlSender, NackError, aio, http_sink
from sidecar import PATIENCE, TOKEN, Connection, Subscriber, Target, TestCase, Wire, emitter, ids, taken, within

ACCEPTS = ["control.cancel", "control.attention.respond"]


class Control(TestCase):
    def client(self, sidecar, token=TOKEN):
        client = ControlClient(sidecar.url, agent="operator", host="test", token=token)
        within(client.connect)
        return self.closing(client)

    def nack(self, client, *arguments, **options):
        with self.assertRaises(NackError) as nacked:
            within(client.send, *arguments, **options)
        # Said by somebody, not made up when nobody answered.
        self.assertFalse(nacked.exception.synthesized)
        return nacked.exception


class Commands(Control):
    def test_command_ack_and_outcome(self):
        sidecar = self.sidecar(AEP_TOKEN=TOKEN)
        subscriber = self.closing(Subscriber(sidecar.url, token=TOKEN, filter={"session": "s"}))
        target = self.closing(Target(sidecar, "s", accepts=ACCEPTS))
        started = target.session.emit("run.started", run="r")
        client = self.client(sidecar)
        ack = within(
            client.send, "control.cancel", "s", run="r", data={"scope": "run", "reason": "enough"},
            capture="redacted")
        command = taken(target.executed)
        self.assertEqual(command["data"], {"scope": "run", "reason": "enough"})
        self.assertEqual((ack["type"], ack["cause"]), ("control.accepted", command["id"]))
        # Readers see who commanded what, and what came of it.
        seen = [taken(subscriber.events) for _ in range(5)]
        self.assertEqual(ids(seen[:4]), ids([target.started, started, command, ack]))
        self.assertEqual((seen[4]["type"], seen[4]["cause"]), ("run.cancelled", command["id"]))
        # And so do those that come later.
        later = self.closing(Subscriber(sidecar.url, token=TOKEN, from_="all"))
        self.assertEqual(later.until(seen[4]), ids(seen))
        self.assertEqual(taken(target.commands), command)
        self.nothing_more(target)

    def test_a_response_goes_to_the_session_that_asked(self):
        sidecar = self.sidecar(AEP_TOKEN=TOKEN)
        asking = self.closing(Target(sidecar, "asking", accepts=ACCEPTS))
        other = self.closing(Target(sidecar, "other", accepts=ACCEPTS))
        asked = asking.session.emit("attention.requested", {"kind": "approval"}, subject="q")
        ack = within(
            self.client(sidecar).send, "control.attention.respond", "asking",
            subject="q", cause=asked["id"], data={"answer": {"option": "yes"}})
        self.assertEqual(ack["session"], "asking")
        self.assertEqual(taken(asking.executed)["data"], {"answer": {"option": "yes"}})
        self.nothing_more(other)

    def test_the_relay_refuses_what_is_not_declared(self):
        sidecar = self.sidecar(AEP_TOKEN=TOKEN)
        target = self.closing(Target(sidecar, "s", accepts=ACCEPTS))
        nack = self.nack(self.client(sidecar), "control.pause", "s")
        self.assertEqual(nack.reason, "unsupported")
        self.assertIn("control.accepts", nack.detail)
        self.nothing_more(target)

    def test_a_target_that_declares_nothing_refuses_by_itself(self):
        sidecar = self.sidecar(AEP_TOKEN=TOKEN)
        target = self.closing(Target(sidecar, "s", accepts=ACCEPTS, declared=False))
        nack = self.nack(self.client(sidecar), "control.pause", "s")
        self.assertEqual((nack.reason, nack.detail), ("unsupported", None))
        self.assertEqual(taken(target.commands)["type"], "control.pause")
        self.nothing_more(target)
        self.nothing_in(target.executed)

    def test_nobody_commands_without_a_token(self):
        sidecar = self.sidecar()
        subscriber = self.closing(Subscriber(sidecar.url))
        target = self.closing(Target(sidecar, "s", accepts=ACCEPTS, token=None))
        nack = self.nack(self.client(sidecar, token=None), "control.cancel", "s", run="r")
        self.assertEqual(nack.reason, "unauthorized")
        last = target.session.emit("run.progress")
        self.assertEqual(subscriber.until(last), ids([target.started, last]))
        self.nothing_more(target)

    def test_no_claim_no_route(self):
        sidecar = self.sidecar(AEP_TOKEN=TOKEN)
        # An event over HTTP claims nothing, and neither does one in another session.
        emitter(sidecar, token=TOKEN).session("s").emit("session.started")
        target = self.closing(Target(sidecar, "other", accepts=ACCEPTS))
        client = self.client(sidecar)
        # The SDK knows the reasons of targets only, and keeps the relay's as text.
        nack = self.nack(client, "control.cancel", "s", run="r")
        self.assertEqual((nack.reason, nack.detail.split(":")[0]), ("invalid", "no-route"))
        self.nothing_more(target)

    def test_two_claims_are_ambiguous_until_one_ends(self):
        sidecar = self.sidecar(AEP_TOKEN=TOKEN)
        one = self.closing(Target(sidecar, "s", accepts=ACCEPTS, agent="one"))
        two = self.closing(Target(sidecar, "s", accepts=ACCEPTS, agent="two"))
        client = self.client(sidecar)
        nack = self.nack(client, "control.cancel", "s", run="r")
        self.assertEqual((nack.reason, nack.detail.split(":")[0]), ("invalid", "ambiguous"))
        self.nothing_more(one)
        self.nothing_more(two)
        two.close()
        deadline = time.monotonic() + PATIENCE
        while [entry["agent"] for entry in within(client.roster)] != ["one"]:
            self.assertLess(time.monotonic(), deadline, "the claim outlives its connection")
        ack = within(client.send, "control.cancel", "s", run="r")
        self.assertEqual(ack["agent"], "one")

    def test_a_retry_is_acknowledged_again_byte_for_byte_and_executed_once(self):
        sidecar = self.sidecar(AEP_TOKEN=TOKEN)
        wire = Wire(sidecar, "/stream?filter=%7B%22type%22%3A%22control.accepted%22%7D", token=TOKEN)
        target = self.closing(Target(sidecar, "s", accepts=ACCEPTS))
        operator = self.closing(Operator(sidecar))
        operator.lost = 1
        ack = within(operator.sender.send, "control.cancel", "s", run="r", ack_window_ms=250, retries=1000)
        first, second = taken(wire.data), taken(wire.data)
        self.assertEqual(first, second)
        self.assertEqual(json.loads(first), ack)
        command = taken(target.executed)
        self.assertEqual(taken(target.commands), command)
        self.assertEqual(taken(target.commands), command)
        target.settle()
        self.nothing_in(target.executed)
        # History has one command, one ack, one outcome.
        held = Wire(sidecar, "/stream?live=0&from=all", token=TOKEN).all()
        self.assertEqual(
            [json.loads(event)["type"] for event in held],
            ["session.started", "control.cancel", "control.accepted", "run.cancelled"])

    def test_no_command_over_http(self):
        sidecar = self.sidecar(AEP_TOKEN=TOKEN)
        target = self.closing(Target(sidecar, "s", accepts=ACCEPTS))
        errors = []
        sender = ControlSender(
            http_sink(sidecar.url, TOKEN, on_error=errors.append), agent="operator", host="test")
        with self.assertRaises(NackError) as nacked:
            sender.send("control.cancel", "s", run="r", ack_window_ms=1, retries=0)
        self.assertEqual(nacked.exception.reason, "timeout")
        self.assertIsInstance(errors[0], urllib.error.HTTPError)
        self.assertEqual(errors[0].code, 403)
        self.nothing_more(target)

    def test_the_asynchronous_client_commands_too(self):
        sidecar = self.sidecar(AEP_TOKEN=TOKEN)
        target = self.closing(Target(sidecar, "s", accepts=ACCEPTS))

        async def command():
            client = aio.ControlClient(sidecar.url, agent="operator", host="test", token=TOKEN)
            await client.connect()
            try:
                entries = await client.roster()
                ack = await client.send("control.cancel", "s", run="r")
                with self.assertRaises(NackError) as nacked:
                    await client.send("control.pause", "s")
                return entries, ack, nacked.exception.reason
            finally:
                await client.close()

        entries, ack, reason = asyncio.run(asyncio.wait_for(command(), PATIENCE))
        self.assertEqual([entry["session"] for entry in entries], ["s"])
        self.assertEqual(ack["cause"], taken(target.executed)["id"])
        self.assertEqual(reason, "unsupported")


class Operator(Connection):
    """The SDK's transport-agnostic sender on a connection, on which acks get lost."""

    def __init__(self, sidecar):
        self.lost = 0
        self.sender = ControlSender(self.send, agent="operator", host="test")
        super().__init__(sidecar, "consumer", token=TOKEN, agent="operator")
        self.send({"type": "subscribe", "id": "acks", "filter": {"type": ["control.accepted", "control.rejected"]}})
        self.frame("subscribed")

    def message(self, message):
        if "." not in message["type"]:
            return super().message(message)
        if self.lost > 0:
            self.lost -= 1
        else:
            self.sender.on_event(message)


class Roster(Control):
    def test_it_says_who_claims_what_as_it_was_declared(self):
        sidecar = self.sidecar(AEP_TOKEN=TOKEN)
        client = self.client(sidecar)
        self.assertEqual(within(client.roster), [])
        one = self.closing(Target(sidecar, "s", accepts=ACCEPTS, agent="one"))
        self.closing(Target(sidecar, "t", accepts=ACCEPTS, agent="two", declared=False))
        one.session.emit("run.started")
        expected = {
            "s": {
                "session": "s", "agent": "one", "instance": "test", "emits": ["session", "run"],
                "control": {"accepts": ACCEPTS, "ack_window_ms": 10_000},
            },
            "t": {"session": "t", "agent": "two", "instance": "test", "emits": ["session", "run"]},
        }
        self.assertEqual({entry["session"]: entry for entry in within(client.roster)}, expected)

    def test_a_relay_without_a_token_has_one_too(self):
        sidecar = self.sidecar()
        target = self.closing(Target(sidecar, "s", accepts=ACCEPTS, token=None))
        client = self.client(sidecar, token=None)
        self.assertEqual([entry["session"] for entry in within(client.roster)], ["s"])
        # What an emitter is told is part of every target's start; it stays connected.
        last = target.session.emit("run.progress")
        subscriber = self.closing(Subscriber(sidecar.url, from_="all"))
        self.assertIn(last["id"], subscriber.until(last))
