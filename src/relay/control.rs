//! Who is connected, what they claim, and the routing of commands to at most one of them.
//!
//! A connection claims a session by sending an event of the session's own sequence in it; an event that it sends
//! about another's session (`attention.routed`) claims nothing. Claims end with the connection. A command goes to
//! the one connection that claims its session, or to nobody.
//!
//! Spec: AEP-0004 §4, AEP-0003 §4.1.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use lru::LruCache;
use parking_lot::Mutex;
use serde::Serialize;
use tokio::sync::mpsc;

use crate::aep::Event;
use crate::aep::frame::{Hello, Role, RosterEntry};

/// Commands that wait for one connection; past it, the connection counts as one that takes none.
const WAITING: usize = 64;

/// Why a command was not routed: a closed set.
///
/// Spec: AEP-0004 §4.2.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Unrouted {
    /// The sender isn't authenticated, or may not command.
    Unauthorized,
    /// No live connection claims the session, or the one that does takes no commands now.
    NoRoute,
    /// More than one does.
    Ambiguous,
    /// The one that does declared that it accepts no such command.
    Unsupported,
    /// The command can't be kept now, and goes nowhere for that.
    NotKept,
}

impl Unrouted {
    /// The wire code.
    #[must_use]
    pub const fn code(self) -> &'static str {
        match self {
            Self::Unauthorized => "unauthorized",
            Self::NoRoute | Self::NotKept => "no-route",
            Self::Ambiguous => "ambiguous",
            Self::Unsupported => "unsupported",
        }
    }

    /// What is wrong, for people.
    #[must_use]
    pub const fn detail(self) -> &'static str {
        match self {
            Self::Unauthorized => "commands need a token that permits control",
            Self::NoRoute => "no connected emitter takes commands for this session",
            Self::NotKept => "the relay can't keep events now, and routes no command without",
            Self::Ambiguous => "more than one connected emitter claims this session",
            Self::Unsupported => "the target does not declare this command in control.accepts",
        }
    }
}

/// The live connections. Cloning shares them.
#[derive(Debug, Clone)]
pub struct Connections(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    /// Guards who is connected and who claims what; held for look-ups only.
    table: Mutex<Table>,
    /// Sessions that one connection may claim; past it, the least recently used claim ends.
    max_claims: usize,
}

#[derive(Debug, Default)]
struct Table {
    next: u64,
    live: BTreeMap<u64, Live>,
    /// The connections that claim a session.
    claims: HashMap<Arc<str>, Vec<u64>>,
}

#[derive(Debug)]
struct Live {
    hello: Hello,
    subscriptions: usize,
    sessions: BTreeSet<Arc<str>>,
    commands: mpsc::Sender<Event>,
}

/// A connection's entry, which ends when it is dropped.
#[derive(Debug)]
pub struct Connection {
    connections: Connections,
    number: u64,
    role: Role,
    /// What this connection claims, by last use.
    claimed: LruCache<Arc<str>, ()>,
}

/// A place among the commands that wait for one connection. Dropping it gives it back.
#[derive(Debug)]
pub(super) struct Route(mpsc::OwnedPermit<Event>);

impl Route {
    /// Hands the command to the connection. One that has gone meanwhile is one that went with it.
    pub(super) fn send(self, command: Event) {
        self.0.send(command);
    }
}

/// A connection, for people who run the relay.
#[derive(Debug, Serialize)]
pub struct Description {
    role: Role,
    identity: Identity,
    #[serde(skip_serializing_if = "Option::is_none")]
    accepts: Option<Vec<String>>,
    sessions: Vec<String>,
    subscriptions: usize,
}

#[derive(Debug, Serialize)]
struct Identity {
    #[serde(skip_serializing_if = "Option::is_none")]
    agent: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    instance: Option<String>,
}

impl Connections {
    /// No connections, each of which may claim `max_claims` sessions.
    #[must_use]
    pub fn new(max_claims: usize) -> Self {
        Self(Arc::new(Shared { table: Mutex::default(), max_claims }))
    }

    /// Enters a connection that said `hello`. The receiver gets the commands that are routed to it.
    #[must_use]
    pub fn open(&self, hello: Hello) -> (Connection, mpsc::Receiver<Event>) {
        let (sender, commands) = mpsc::channel(WAITING);
        let role = hello.role;
        let mut table = self.0.table.lock();
        let number = table.next;
        table.next += 1;
        table
            .live
            .insert(number, Live { hello, subscriptions: 0, sessions: BTreeSet::new(), commands: sender });
        drop(table);
        // Bounded by hand: a bounded one would take the room for all claims at once.
        let claimed = LruCache::unbounded();
        (Connection { connections: self.clone(), number, role, claimed }, commands)
    }

    /// The way to the one connection that claims the command's session, with a place for it.
    ///
    /// # Errors
    /// When there is no such connection, more than one, or one that can't take it.
    pub(super) fn route(&self, command: &Event) -> Result<Route, Unrouted> {
        let table = self.0.table.lock();
        let claimants = command.session().and_then(|session| table.claims.get(session));
        let target = match claimants.map(Vec::as_slice) {
            None | Some([]) => return Err(Unrouted::NoRoute),
            Some([one]) => table.live.get(one).ok_or(Unrouted::NoRoute)?,
            Some(_) => return Err(Unrouted::Ambiguous),
        };
        if let Some(accepts) = &target.hello.accepts
            && !accepts.iter().any(|accepted| accepted == command.event_type())
        {
            return Err(Unrouted::Unsupported);
        }
        // A target that doesn't read its commands has no route: the sender may try again.
        target.commands.clone().try_reserve_owned().map(Route).map_err(|_| Unrouted::NoRoute)
    }

    /// One entry for each live claim.
    #[must_use]
    pub fn roster(&self) -> Vec<RosterEntry> {
        let table = self.0.table.lock();
        let entries = table.live.values().flat_map(|live| {
            live.sessions.iter().map(|session| RosterEntry {
                session: session.to_string(),
                agent: live.hello.agent.clone(),
                instance: live.hello.instance.clone(),
                control: live.hello.control.clone(),
                emits: live.hello.emits.clone(),
            })
        });
        entries.collect()
    }

    /// Every connection.
    #[must_use]
    pub fn describe(&self) -> Vec<Description> {
        let table = self.0.table.lock();
        let describe = |live: &Live| Description {
            role: live.hello.role,
            identity: Identity { agent: live.hello.agent.clone(), instance: live.hello.instance.clone() },
            accepts: live.hello.accepts.clone(),
            sessions: live.sessions.iter().map(ToString::to_string).collect(),
            subscriptions: live.subscriptions,
        };
        table.live.values().map(describe).collect()
    }

    /// How many there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.table.lock().live.len()
    }

    /// Whether there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl Connection {
    /// Claims the session of an event that this connection sent.
    pub fn claim(&mut self, session: &str) {
        if self.role == Role::Consumer || self.claimed.get(session).is_some() {
            return;
        }
        let session: Arc<str> = session.into();
        self.claimed.put(Arc::clone(&session), ());
        let dropped =
            (self.claimed.len() > self.connections.0.max_claims).then(|| self.claimed.pop_lru()).flatten();
        let mut table = self.connections.0.table.lock();
        if let Some((dropped, ())) = dropped {
            table.release(self.number, &dropped);
        }
        table.claims.entry(Arc::clone(&session)).or_default().push(self.number);
        if let Some(live) = table.live.get_mut(&self.number) {
            live.sessions.insert(session);
        }
    }

    /// Whether the peer said that it only emits.
    #[must_use]
    pub fn is_emitter(&self) -> bool {
        self.role == Role::Emitter
    }

    /// Notes how many subscriptions the connection has.
    pub fn set_subscriptions(&self, count: usize) {
        if let Some(live) = self.connections.0.table.lock().live.get_mut(&self.number) {
            live.subscriptions = count;
        }
    }
}

impl Table {
    fn release(&mut self, number: u64, session: &str) {
        if let Some(claimants) = self.claims.get_mut(session) {
            claimants.retain(|claimant| *claimant != number);
            if claimants.is_empty() {
                self.claims.remove(session);
            }
        }
        if let Some(live) = self.live.get_mut(&number) {
            live.sessions.remove(session);
        }
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        let mut table = self.connections.0.table.lock();
        let Some(live) = table.live.remove(&self.number) else { return };
        for session in &live.sessions {
            table.release(self.number, session);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn command(event_type: &str, session: &str) -> Event {
        Event::parse_str(&format!(
            r#"{{"aep":"0.1","id":"c","type":"{event_type}","time":"2026-07-03T10:00:00Z","source":"aep://h","agent":"a","session":"{session}"}}"#
        ))
        .unwrap()
    }

    /// Routes it and hands it over.
    fn route(connections: &Connections, command: &Event) -> Result<(), Unrouted> {
        connections.route(command).map(|route| route.send(command.clone()))
    }

    fn hello(role: Role, accepts: Option<&[&str]>) -> Hello {
        let accepts = accepts.map(|accepts| accepts.iter().map(ToString::to_string).collect());
        Hello { role, accepts, ..Hello::default() }
    }

    #[test]
    fn a_command_goes_to_the_one_claimant_or_to_nobody() {
        let connections = Connections::new(10);
        let cancel = command("control.cancel", "s");
        assert_eq!(route(&connections, &cancel), Err(Unrouted::NoRoute));
        let (mut one, mut commands) = connections.open(hello(Role::Emitter, None));
        one.claim("s");
        one.claim("s");
        assert_eq!(route(&connections, &cancel), Ok(()));
        assert_eq!(commands.try_recv().unwrap(), cancel);
        let (mut two, _commands) = connections.open(hello(Role::Both, None));
        two.claim("s");
        assert_eq!(route(&connections, &cancel), Err(Unrouted::Ambiguous));
        assert_eq!(connections.roster().len(), 2);
        drop(one);
        assert_eq!(route(&connections, &cancel), Ok(()));
        drop(two);
        assert_eq!(route(&connections, &cancel), Err(Unrouted::NoRoute));
        assert!(connections.is_empty() && connections.0.table.lock().claims.is_empty());
    }

    #[test]
    fn a_consumer_claims_nothing() {
        let connections = Connections::new(10);
        let (mut consumer, _commands) = connections.open(hello(Role::Consumer, None));
        consumer.claim("s");
        assert_eq!(route(&connections, &command("control.cancel", "s")), Err(Unrouted::NoRoute));
    }

    #[test]
    fn what_is_declared_is_authoritative() {
        let connections = Connections::new(10);
        let (mut target, _commands) = connections.open(hello(Role::Emitter, Some(&["control.cancel"])));
        target.claim("s");
        assert_eq!(route(&connections, &command("control.pause", "s")), Err(Unrouted::Unsupported));
        assert_eq!(route(&connections, &command("control.cancel", "s")), Ok(()));
    }

    #[test]
    fn a_target_that_does_not_read_has_no_route() {
        let connections = Connections::new(10);
        let (mut target, _commands) = connections.open(hello(Role::Emitter, None));
        target.claim("s");
        for _ in 0..WAITING {
            assert_eq!(route(&connections, &command("control.cancel", "s")), Ok(()));
        }
        assert_eq!(route(&connections, &command("control.cancel", "s")), Err(Unrouted::NoRoute));
    }

    #[test]
    fn claims_are_bounded_and_the_oldest_ends() {
        let connections = Connections::new(3);
        let (mut target, _commands) = connections.open(hello(Role::Emitter, None));
        for n in 0..100_000 {
            target.claim(&format!("s{n}"));
        }
        assert_eq!(connections.roster().len(), 3);
        assert_eq!(connections.0.table.lock().claims.len(), 3);
        assert_eq!(route(&connections, &command("control.cancel", "s99999")), Ok(()));
        assert_eq!(route(&connections, &command("control.cancel", "s0")), Err(Unrouted::NoRoute));
    }
}
