//! A sink over HTTP that behaves as it is told, and remembers what it took and what it said.
#![allow(
    unreachable_pub,
    dead_code,
    reason = "every test crate has its own copy and uses its own part of it"
)]
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "a helper of tests fails by panicking"
)]

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use serde_json::Value;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinSet;

/// What becomes of one delivery.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Answer {
    /// Taken, and said so.
    Take,
    /// Taken, and said so after a while.
    TakeAfter(Duration),
    /// Taken, but instead of an answer the connection is reset.
    TakeAndReset,
    /// Not taken; that status, with `Retry-After: 0`.
    Refuse(u16),
    /// Neither taken nor answered, for as long as the other side waits.
    Hang,
}

/// What was said about an event that was taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// Nothing: the other side was gone, or it was too early to tell.
    Unanswered,
    /// That it is taken: the how manieth such answer this was.
    Answered(usize),
    /// Nothing, on purpose.
    Withheld,
}

/// An event that was taken.
#[derive(Debug, Clone)]
pub struct Arrival {
    pub source: String,
    pub id: String,
    pub session: String,
    pub seq: u64,
    /// How many times the other side had been killed before.
    pub life: usize,
    pub outcome: Outcome,
    pub event: Value,
}

type Behaviour = Box<dyn FnMut(&Value) -> Answer + Send>;

/// The sink. It stops when it is dropped.
pub struct Sink {
    pub url: String,
    address: SocketAddr,
    shared: Arc<Shared>,
    _accepting: JoinSet<()>,
}

struct Shared {
    behaviour: Mutex<Behaviour>,
    heard: Mutex<Heard>,
    /// Told after each change of `heard`.
    changed: watch::Sender<()>,
}

#[derive(Default)]
struct Heard {
    arrivals: Vec<Arrival>,
    answers: usize,
    refused: usize,
    life: usize,
    /// The client address of the connection that begins the next life.
    marker: Option<SocketAddr>,
    /// Open connections of each life.
    open: BTreeMap<usize, usize>,
}

impl Sink {
    /// A sink on a free port that takes everything.
    pub async fn start() -> Self {
        Self::on(TcpListener::bind("127.0.0.1:0").await.unwrap())
    }

    /// A sink that takes everything.
    pub fn on(listener: TcpListener) -> Self {
        let address = listener.local_addr().unwrap();
        let shared = Arc::new(Shared {
            behaviour: Mutex::new(Box::new(|_| Answer::Take)),
            heard: Mutex::default(),
            changed: watch::Sender::default(),
        });
        let mut accepting = JoinSet::new();
        accepting.spawn(accept(listener, Arc::clone(&shared)));
        Self { url: format!("http://{address}/"), address, shared, _accepting: accepting }
    }

    /// How it behaves from now on, told for each delivery by the event in it.
    pub fn behaves(&self, behaviour: impl FnMut(&Value) -> Answer + Send + 'static) {
        *self.shared.behaviour.lock() = Box::new(behaviour);
    }

    /// What it has taken.
    pub fn arrivals(&self) -> Vec<Arrival> {
        self.shared.heard.lock().arrivals.clone()
    }

    /// How many deliveries it has taken.
    pub fn taken(&self) -> usize {
        self.shared.heard.lock().arrivals.len()
    }

    /// How many deliveries it has refused.
    pub fn refused(&self) -> usize {
        self.shared.heard.lock().refused
    }

    /// Waits until it has refused that many.
    pub async fn refuses(&self, count: usize) {
        let mut changed = self.shared.changed.subscribe();
        let refused = async {
            while self.refused() < count {
                changed.changed().await.unwrap();
            }
        };
        let in_time = tokio::time::timeout(Duration::from_secs(60), refused).await;
        assert!(in_time.is_ok(), "{count} deliveries are never tried");
    }

    /// Waits until what it has taken satisfies `done`, which sees all of it each time; false after `patience`.
    pub async fn until(&self, patience: Duration, mut done: impl FnMut(&[Arrival]) -> bool) -> bool {
        let mut changed = self.shared.changed.subscribe();
        let wait = async {
            while !done(&self.shared.heard.lock().arrivals) {
                changed.changed().await.unwrap();
            }
        };
        tokio::time::timeout(patience, wait).await.is_ok()
    }

    /// Waits until each of these has arrived, and tells what never does.
    pub async fn has(&self, patience: Duration, keys: impl IntoIterator<Item = Key>) -> BTreeSet<Key> {
        let mut missing: BTreeSet<Key> = keys.into_iter().collect();
        let mut read = 0;
        self.until(patience, |arrivals| {
            for arrival in &arrivals[read..] {
                missing.remove(&arrival.key());
            }
            read = arrivals.len();
            missing.is_empty()
        })
        .await;
        missing
    }

    /// What comes on connections made after this is of the other side's next life. To be called once it is dead;
    /// returns when everything it had sent is heard.
    pub async fn killed(&self) {
        let socket = TcpSocket::new_v4().unwrap();
        socket.bind("127.0.0.1:0".parse().unwrap()).unwrap();
        self.shared.heard.lock().marker = Some(socket.local_addr().unwrap());
        let mut changed = self.shared.changed.subscribe();
        // Connections are accepted in the order they were made.
        let _marker = socket.connect(self.address).await.unwrap();
        loop {
            {
                let heard = self.shared.heard.lock();
                let earlier = heard.open.range(..heard.life).any(|(_, open)| *open > 0);
                if heard.marker.is_none() && !earlier {
                    return;
                }
            }
            changed.changed().await.unwrap();
        }
    }
}

/// `(source, id)`.
pub type Key = (String, String);

impl Arrival {
    fn read(event: Value, life: usize) -> Self {
        let text =
            |name: &str| event[name].as_str().unwrap_or_else(|| panic!("no {name}: {event}")).to_owned();
        Self {
            source: text("source"),
            id: text("id"),
            session: text("aepsessionid"),
            seq: event["aepsequence"].as_u64().unwrap_or_else(|| panic!("no seq: {event}")),
            life,
            outcome: Outcome::Unanswered,
            event,
        }
    }

    pub fn key(&self) -> Key {
        (self.source.clone(), self.id.clone())
    }
}

/// What breaks the order: within each session, first arrivals with a position that isn't above the one before.
pub fn disorder(arrivals: &[Arrival]) -> Vec<String> {
    let mut known = BTreeSet::new();
    let mut last: BTreeMap<(&str, &str), u64> = BTreeMap::new();
    let mut wrong = Vec::new();
    for arrival in arrivals.iter().filter(|arrival| known.insert(arrival.key())) {
        let before = last.insert((&arrival.source, &arrival.session), arrival.seq);
        if before.is_some_and(|before| before >= arrival.seq) {
            wrong.push(format!("{} of {} after {before:?}", arrival.id, arrival.source));
        }
    }
    wrong
}

/// What arrived more than once, as often as it came again.
pub fn repeats(arrivals: &[Arrival]) -> Vec<Key> {
    let mut known = BTreeSet::new();
    arrivals.iter().map(Arrival::key).filter(|key| !known.insert(key.clone())).collect()
}

impl Shared {
    fn change<T>(&self, change: impl FnOnce(&mut Heard) -> T) -> T {
        let result = change(&mut self.heard.lock());
        self.changed.send_replace(());
        result
    }
}

async fn accept(listener: TcpListener, shared: Arc<Shared>) {
    let mut connections = JoinSet::new();
    loop {
        let (stream, peer) = listener.accept().await.unwrap();
        stream.set_nodelay(true).unwrap();
        let life = shared.change(|heard| {
            if heard.marker == Some(peer) {
                heard.marker = None;
                heard.life += 1;
                return None;
            }
            *heard.open.entry(heard.life).or_default() += 1;
            Some(heard.life)
        });
        let Some(life) = life else { continue };
        let shared = Arc::clone(&shared);
        connections.spawn(async move {
            converse(&shared, stream, life).await;
            shared.change(|heard| *heard.open.get_mut(&life).unwrap() -= 1);
        });
        while connections.try_join_next().is_some() {}
    }
}

/// Answers deliveries until the connection ends.
async fn converse(shared: &Shared, mut stream: TcpStream, life: usize) {
    let mut buffer = Vec::new();
    while let Some(body) = request(&mut stream, &mut buffer).await {
        let event: Value = serde_json::from_slice(&body).unwrap();
        let answer = (*shared.behaviour.lock())(&event);
        match answer {
            Answer::Refuse(status) => {
                shared.change(|heard| heard.refused += 1);
                let head = format!("HTTP/1.1 {status} -\r\nretry-after: 0\r\ncontent-length: 0\r\n\r\n");
                if stream.write_all(head.as_bytes()).await.is_err() {
                    return;
                }
                continue;
            }
            Answer::Hang => {
                shared.change(|heard| heard.refused += 1);
                let mut rest = [0; 1024];
                while stream.read(&mut rest).await.is_ok_and(|more| more > 0) {}
                return;
            }
            Answer::Take | Answer::TakeAfter(_) | Answer::TakeAndReset => {}
        }
        let arrival = Arrival::read(event, life);
        let at = shared.change(|heard| {
            heard.arrivals.push(arrival);
            heard.arrivals.len() - 1
        });
        match answer {
            Answer::TakeAndReset => {
                shared.change(|heard| heard.arrivals[at].outcome = Outcome::Withheld);
                // Closed with a reset.
                socket2::SockRef::from(&stream).set_linger(Some(Duration::ZERO)).unwrap();
                return;
            }
            Answer::TakeAfter(pause) => tokio::time::sleep(pause).await,
            _ => {}
        }
        if stream.write_all(b"HTTP/1.1 204 -\r\n\r\n").await.is_err() {
            return;
        }
        shared.change(|heard| {
            heard.arrivals[at].outcome = Outcome::Answered(heard.answers);
            heard.answers += 1;
        });
    }
}

/// The body of the next request; `None` when there is no whole one any more.
async fn request(stream: &mut TcpStream, buffer: &mut Vec<u8>) -> Option<Vec<u8>> {
    loop {
        if let Some(head) = buffer.windows(4).position(|four| four == b"\r\n\r\n") {
            let text = std::str::from_utf8(&buffer[..head]).unwrap().to_ascii_lowercase();
            let length = text.lines().find_map(|line| line.strip_prefix("content-length:"));
            let length: usize = length.unwrap_or_else(|| panic!("no length: {text}")).trim().parse().unwrap();
            let whole = head + 4 + length;
            if buffer.len() >= whole {
                let body = buffer[head + 4..whole].to_vec();
                buffer.drain(..whole);
                return Some(body);
            }
        }
        if stream.read_buf(buffer).await.ok()? == 0 {
            return None;
        }
    }
}
