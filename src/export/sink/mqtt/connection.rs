//! One connection to an MQTT server, which ends rather than being remade behind the sink's back.
//!
//! The client library would connect again by itself and send what it still held, when other attempts with the same
//! events have been made and answered. It is kept from that: it is handed one connection, and is gone at its end with
//! all that was under way.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use parking_lot::Mutex;
use rumqttc::{
    AsyncClient, ClientError, ConnAck, Event, EventLoop, MqttOptions, Packet, Publish, PublishNotice,
    PublishOptions, PublishResult, QoS,
};
use rustls::pki_types::ServerName;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio_rustls::TlsConnector;

use super::super::dial::{Address, lost};
use super::super::link::{self, CONNECT_TIMEOUT};
use super::super::{DeliveryError, Reason, Secret};
use super::judge::{self, End, Failure, transient};

/// How often a silent server is asked whether it is there, in seconds.
const KEEP_ALIVE: u16 = 20;
/// How many messages may wait for their acknowledgement, unless the server says less. Bounded by the deliveries side by
/// side long before.
const IN_FLIGHT: u16 = 1024;
/// How many messages may wait for the library; whoever has more waits.
const QUEUE: usize = 64;

/// Where a server is, and how to be let in.
#[derive(Debug)]
pub(super) struct Access {
    pub(super) address: Address,
    pub(super) client_id: String,
    pub(super) user: Option<String>,
    /// Read again at every connection.
    pub(super) password: Option<Secret>,
}

/// A connection that was made.
pub(super) struct Connection {
    client: AsyncClient,
    /// The largest packet that the server takes, in bytes.
    largest: usize,
    /// Why it has ended, and whether one attempt only was under way; set once, by the driver.
    end: watch::Receiver<Option<(End, bool)>>,
    /// How many attempts are under way. One that is dropped half-way is for good: its messages may be.
    under_way: Arc<AtomicUsize>,
    /// Set when no attempt is to go over it any more.
    spent: AtomicBool,
    /// Reads and writes. Ends with this value, and the socket with it.
    _driver: JoinSet<()>,
}

/// What is read from and written to.
trait Duplex: AsyncRead + AsyncWrite + Send + Sync + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Sync + Unpin> Duplex for T {}

impl link::Connection for Connection {
    fn is_usable(&self) -> bool {
        self.end.borrow().is_none() && !self.spent.load(Ordering::Relaxed)
    }
}

impl Connection {
    /// Connects and logs in.
    pub(super) async fn open(access: &Arc<Access>) -> Result<Self, DeliveryError> {
        let made = tokio::time::timeout(CONNECT_TIMEOUT, connect(access)).await;
        made.unwrap_or_else(|_| Err(transient(Reason::ConnectTimeout)))
    }

    /// No attempt is to go over it any more.
    pub(super) fn give_up(&self) {
        self.spent.store(true, Ordering::Relaxed);
    }

    /// Publishes the messages of each round side by side, once those of the round before are acknowledged.
    pub(super) async fn publish(&self, rounds: Vec<Vec<Publish>>) -> Result<(), Failure> {
        if rounds.iter().flatten().any(|message| message.size() > self.largest) {
            return Err(judge::too_large("larger than the server's Maximum Packet Size").into());
        }
        self.under_way.fetch_add(1, Ordering::AcqRel);
        let mut outcome = Ok(());
        for round in rounds {
            outcome = self.publish_round(round).await;
            if outcome.is_err() {
                break;
            }
        }
        self.under_way.fetch_sub(1, Ordering::AcqRel);
        outcome
    }

    async fn publish_round(&self, round: Vec<Publish>) -> Result<(), Failure> {
        let mut notices = Vec::with_capacity(round.len());
        for Publish { topic, payload, properties, .. } in round {
            let topic = String::from_utf8(topic.to_vec())
                .map_err(|_| Failure::from(judge::refused(Reason::Protocol, "its topic isn't UTF-8")))?;
            let options = PublishOptions::new(QoS::AtLeastOnce);
            let options = match properties {
                None => options,
                Some(properties) => options.properties(properties),
            };
            match self.client.publish_tracked(topic, payload, options).await {
                Ok(notice) => notices.push(notice),
                Err(ClientError::InvalidRequest(_)) => {
                    return Err(judge::refused(Reason::Protocol, "not a topic's name").into());
                }
                Err(_) => return Err(self.ended().await),
            }
        }
        let mut failures = Vec::new();
        for notice in notices {
            failures.extend(self.acknowledged(notice).await.err());
        }
        // A verdict on one event comes last: while another fails for want of a server, it says nothing of the batch.
        let first = failures.into_iter().min_by_key(|failure| match failure.error {
            DeliveryError::Misconfigured { .. } | DeliveryError::Closed { .. } => 0,
            DeliveryError::Transient { .. } => 1,
            DeliveryError::Rejected { .. } => 2,
        });
        first.map_or(Ok(()), Err)
    }

    async fn acknowledged(&self, notice: PublishNotice) -> Result<(), Failure> {
        match notice.wait_async().await {
            Ok(PublishResult::Qos1(acknowledgement)) => {
                let outcome = judge::acknowledgement(acknowledgement.reason);
                outcome.map_err(Failure::from)
            }
            Ok(_) => Err(DeliveryError::Misconfigured { reason: Reason::Protocol }.into()),
            Err(_) => Err(self.ended().await),
        }
    }

    /// What an attempt fails with whose messages the library has dropped.
    async fn ended(&self) -> Failure {
        let mut end = self.end.clone();
        let ended = end.wait_for(Option::is_some).await;
        match ended.as_deref() {
            Ok(Some((end, alone))) => end.clone().failure(*alone),
            Ok(None) | Err(_) => transient(Reason::ConnectionLost).into(),
        }
    }
}

async fn connect(access: &Access) -> Result<Connection, DeliveryError> {
    let config = access.address.client_config().await?;
    let stream = access.address.connect().await?;
    let stream: Box<dyn Duplex> = match config {
        None => Box::new(stream),
        Some(config) => {
            let untrusted = |_| DeliveryError::Misconfigured { reason: Reason::Certificate };
            let name = ServerName::try_from(access.address.host.clone()).map_err(untrusted)?;
            let connector = TlsConnector::from(Arc::new(config));
            Box::new(connector.connect(name, stream).await.map_err(|error| lost(&error))?)
        }
    };
    let mut options =
        MqttOptions::new(access.client_id.clone(), (access.address.host.clone(), access.address.port));
    options
        .set_keep_alive(KEEP_ALIVE)
        .set_connect_timeout(CONNECT_TIMEOUT)
        .set_clean_start(true)
        .set_request_channel_capacity(QUEUE)
        .set_outgoing_inflight_upper_limit(IN_FLIGHT);
    let password = access.password.as_ref().map(|password| password.current().to_string());
    match (access.user.clone(), password) {
        (Some(user), Some(password)) => {
            options.set_credentials(user, password);
        }
        (Some(user), None) => {
            options.set_username(user);
        }
        (None, Some(password)) => {
            options.set_password(password);
        }
        (None, None) => {}
    }
    // Once: the library is not to connect again.
    let stream = Mutex::new(Some(stream));
    options.set_socket_connector(move |_, _| {
        let stream = stream.lock().take();
        std::future::ready(stream.ok_or_else(|| io::Error::from(io::ErrorKind::NotConnected)))
    });
    let (client, mut events) = AsyncClient::builder(options).build();
    let welcome = welcome(&mut events).await?;
    let properties = welcome.properties.as_ref();
    if properties.is_some_and(|properties| properties.max_qos == Some(0)) {
        // It acknowledges nothing.
        return Err(DeliveryError::Misconfigured { reason: Reason::Protocol });
    }
    let largest = properties.and_then(|properties| properties.max_packet_size);
    let (tell, end) = watch::channel(None);
    let under_way = Arc::new(AtomicUsize::new(0));
    let mut driver = JoinSet::new();
    driver.spawn(drive(events, tell, Arc::clone(&under_way)));
    Ok(Connection {
        client,
        largest: largest.and_then(|largest| largest.try_into().ok()).unwrap_or(usize::MAX),
        end,
        under_way,
        spent: AtomicBool::new(false),
        _driver: driver,
    })
}

/// The server's consent.
async fn welcome(events: &mut EventLoop) -> Result<ConnAck, DeliveryError> {
    loop {
        match events.poll().await {
            Ok(Event::Incoming(Packet::ConnAck(welcome))) => return Ok(welcome),
            Ok(_) => {}
            Err(error) => return Err(judge::connecting(&error)),
        }
    }
}

/// Reads and writes until the connection ends, and tells why.
async fn drive(mut events: EventLoop, tell: watch::Sender<Option<(End, bool)>>, under_way: Arc<AtomicUsize>) {
    loop {
        if let Err(error) = events.poll().await {
            let alone = under_way.load(Ordering::Acquire) <= 1;
            let _before = tell.send_replace(Some((judge::ended(&error), alone)));
            // Those who wait are woken as what they wait for goes.
            return;
        }
    }
}
