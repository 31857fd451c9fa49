"""The SDK's subscriber over SSE: filter, capture ceiling, and resume, also across a restart of the sidecar."""
import asyncio

from aep_sdk import aio
from sidecar import PATIENCE, TOKEN, Connection, Subscriber, TestCase, emitter, ids, taken


class Selected(TestCase):
    def test_a_filter_selects(self):
        sidecar = self.sidecar(AEP_TOKEN=TOKEN)
        wanted = {"type": ["run.*", "tool.failed"], "severity": {"gte": "warning"}, "tenant": "a"}
        subscriber = self.closing(Subscriber(sidecar.url, token=TOKEN, filter=wanted))
        session = emitter(sidecar, token=TOKEN).session("s")
        tenant = {"tenant": "a"}
        session.emit("session.started", severity="error", extensions=tenant)
        session.emit("tool.requested", severity="error", extensions=tenant)
        session.emit("run.failed", severity="error", extensions={"tenant": "b"})
        session.emit("run.progress", extensions=tenant)
        first = session.emit("tool.failed", severity="warning", extensions=tenant)
        last = session.emit("run.failed", severity="critical", extensions=tenant)
        self.assertEqual([taken(subscriber.events), taken(subscriber.events)], [first, last])

    def test_a_ceiling_lowers(self):
        sidecar = self.sidecar()
        whole = self.closing(Subscriber(sidecar.url))
        lowered = self.closing(Subscriber(sidecar.url, capture="metadata"))
        nothing = self.closing(Subscriber(sidecar.url, capture="none"))
        session = emitter(sidecar, capture="full").session("s")
        event = session.emit("tool.failed", {"error": {"type": "Timeout", "message": "secret"}})
        kept = {"error": {"type": "Timeout"}}
        self.assertEqual(taken(whole.events), event)
        self.assertEqual(taken(lowered.events), {**event, "capture": "metadata", "data": kept})
        without = {name: value for name, value in event.items() if name != "data"}
        self.assertEqual(taken(nothing.events), {**without, "capture": "none"})

    def test_what_is_malformed_is_an_error_to_the_caller(self):
        sidecar = self.sidecar()
        for options in ({"filter": {"seq": 1}}, {"capture": "some"}):
            subscriber = self.closing(Subscriber(sidecar.url, wait=False, **options))
            error = taken(subscriber.errors)
            self.assertEqual((error.kind, error.status), ("http", 400), options)

    def test_without_the_token_there_is_no_stream(self):
        sidecar = self.sidecar(AEP_TOKEN=TOKEN)
        subscriber = self.closing(Subscriber(sidecar.url, wait=False))
        self.assertEqual(taken(subscriber.errors).status, 401)


class Resumed(TestCase):
    def test_a_late_subscriber_gets_everything_that_is_held(self):
        sidecar = self.sidecar()
        sessions = [emitter(sidecar).session(name) for name in ("a", "b:with:colons", "ç")]
        emitted = [session.emit("run.progress") for session in sessions for _ in range(5)]
        subscriber = self.closing(Subscriber(sidecar.url, from_="all"))
        self.assertEqual(
            sorted(taken(subscriber.events)["id"] for _ in emitted), sorted(ids(emitted)))
        live = sessions[0].emit("run.completed")
        self.assertEqual(taken(subscriber.events), live)

    def test_a_resume_starts_after_the_position(self):
        sidecar = self.sidecar()
        session = emitter(sidecar, epoch=2).session("s")
        emitted = [session.emit("run.progress") for _ in range(10)]
        subscriber = self.closing(Subscriber(sidecar.url, from_=[{"session": "s", "epoch": 2, "seq": 3}]))
        self.assertEqual(subscriber.until(emitted[-1]), ids(emitted[4:]))
        self.assertEqual(subscriber.subscription.positions(), [{"session": "s", "epoch": 2, "seq": 9}])

    def test_what_was_evicted_is_told(self):
        sidecar = self.sidecar(AEP_BUFFER="3")
        session = emitter(sidecar).session("s")
        emitted = [session.emit("run.progress") for _ in range(10)]
        subscriber = self.closing(
            Subscriber(sidecar.url, wait=False, from_=[{"session": "s", "epoch": 0, "seq": 2}]))
        subscriber.comment("replay-exhausted s 0:7")
        self.assertEqual(subscriber.until(emitted[-1]), ids(emitted[7:]))

    def test_a_resume_set_past_the_budget_is_drained_in_parts(self):
        sidecar = self.sidecar()
        sdk = emitter(sidecar)
        sessions = [sdk.session(f"session-{n}") for n in range(40)]
        first = [session.emit("session.started") for session in sessions]
        missed = [session.emit("run.started") for session in sessions]
        positions = [{"session": event["session"], "epoch": 0, "seq": 0} for event in first]
        subscriber = self.closing(Subscriber(sidecar.url, from_=positions, from_budget=400, wait=False))
        self.assertEqual(sorted(taken(subscriber.events)["id"] for _ in missed), sorted(ids(missed)))
        # Replies that only replay end with this; there are several.
        for _ in range(5):
            subscriber.comment("replay-complete")
        self.nothing_in(subscriber.errors)

    def test_a_restart_loses_and_repeats_nothing(self):
        sidecar = self.sidecar()
        session = emitter(sidecar).session("s")
        subscriber = self.closing(Subscriber(sidecar.url))
        early = self.closing(Subscriber(sidecar.url))
        emitted = [session.emit("run.progress") for _ in range(3)]
        early.until(emitted[-1])
        # One reader leaves here, and keeps its positions.
        positions = early.subscription.positions()
        early.close()
        emitted += [session.emit("run.progress") for _ in range(3)]
        self.assertEqual(subscriber.until(emitted[-1]), ids(emitted))

        sidecar.stop()
        # The other one stays, and is told.
        subscriber.comment("shutting-down")
        restarted = self.sidecar(AEP_PORT=sidecar.port)
        self.assertEqual(restarted.address, sidecar.address)
        subscriber.attached()

        # The emitter has kept what it emitted, and delivers it again.
        for event in emitted:
            session.redeliver(event)
        later = [session.emit("run.progress") for _ in range(4)]
        self.assertEqual(subscriber.until(later[-1]), ids(later))
        back = self.closing(Subscriber(restarted.url, from_=positions))
        self.assertEqual(back.until(later[-1]), ids([*emitted[3:], *later]))
        restarted.stop()

    def test_a_restart_is_survived_by_a_reader_that_comes_back_late(self):
        sidecar = self.sidecar(AEP_TOKEN=TOKEN)
        session = emitter(sidecar, token=TOKEN).session("s")
        subscriber = self.closing(Subscriber(sidecar.url, token=TOKEN))
        emitted = [session.emit("run.progress") for _ in range(5)]
        subscriber.until(emitted[-1])
        positions = subscriber.subscription.positions()
        subscriber.close()
        sidecar.stop()
        restarted = self.sidecar(AEP_PORT=sidecar.port, AEP_TOKEN=TOKEN)
        # Not everything comes again: what the restarted relay holds starts within what the reader has.
        for event in emitted[3:]:
            session.redeliver(event)
        away = [session.emit("run.progress") for _ in range(5)]
        back = self.closing(Subscriber(restarted.url, token=TOKEN, from_=positions))
        live = session.emit("run.completed")
        self.assertEqual(back.until(live), ids([*away, live]))
        self.nothing_in(back.errors)


class OverWebSocket(TestCase):
    def test_a_stop_says_where_to_resume(self):
        sidecar = self.sidecar(AEP_TOKEN=TOKEN)
        session = emitter(sidecar, token=TOKEN).session("s")
        emitted = [session.emit("run.progress") for _ in range(5)]
        before = self.closing(Connection(sidecar, "consumer", token=TOKEN))
        start = [{"session": "s", "epoch": 0, "seq": 1}]
        before.send({"type": "subscribe", "id": "sub", "filter": {}, "from": start})
        self.assertEqual([before.frame("run.progress") for _ in range(3)], emitted[2:])
        sidecar.stop()
        closing = before.frame("closing")
        self.assertEqual(closing["reason"], "shutting-down")
        self.assertEqual(closing["delivered"], [{"sub": "sub", "session": "s", "epoch": 0, "seq": 4}])
        self.assertIsNone(taken(before.received))

        restarted = self.sidecar(AEP_PORT=sidecar.port, AEP_TOKEN=TOKEN)
        for event in emitted:
            session.redeliver(event)
        later = [session.emit("run.progress") for _ in range(3)]
        after = self.closing(Connection(restarted, "consumer", token=TOKEN))
        start = [{name: place[name] for name in ("session", "epoch", "seq")} for place in closing["delivered"]]
        after.send({"type": "subscribe", "id": "sub", "filter": {}, "from": start})
        self.assertEqual([after.frame("run.progress") for _ in range(3)], later)


class Asynchronous(TestCase):
    def test_a_replay_ends_by_itself(self):
        sidecar = self.sidecar()
        session = emitter(sidecar).session("s")
        emitted = [session.emit("run.progress") for _ in range(10)]

        async def replay():
            subscription = await aio.subscribe(
                sidecar.url, filter={"session": "s"}, from_=[{"session": "s", "epoch": 0, "seq": 4}], live=False)
            return [event async for event in subscription]

        got = asyncio.run(asyncio.wait_for(replay(), PATIENCE))
        self.assertEqual(got, emitted[5:])

    def test_live_events_are_iterated(self):
        sidecar = self.sidecar()
        session = emitter(sidecar).session("s")

        async def first():
            attached = asyncio.Event()
            subscription = await aio.subscribe(sidecar.url, on_comment=lambda _: attached.set())
            await attached.wait()
            emitted = await asyncio.to_thread(session.emit, "run.progress")
            async for event in subscription:
                subscription.close()
                return emitted, event

        emitted, got = asyncio.run(asyncio.wait_for(first(), PATIENCE))
        self.assertEqual(got, emitted)
