//! One connection to an AMQP server, which ends rather than being remade behind the sink's back.
//!
//! A delivery has a channel of its own for as long as it takes. The library knows which channel a message came back on
//! but, with several under way, not which message it was; and a server that refuses one message closes the channel with
//! all that are under way on it. Both then concern that delivery only.

use std::net::Shutdown;

use async_compat::Compat;
use lapin::options::{BasicPublishOptions, ConfirmSelectOptions};
use lapin::tcp::{AsyncTcpStream, RustlsConnector};
use lapin::types::ShortString;
use lapin::uri::{AMQPAuthority, AMQPQueryString, AMQPScheme, AMQPUri, AMQPUserInfo};
use lapin::{Channel, ConnectionProperties, Error, ErrorKind};
use parking_lot::Mutex;
use socket2::{SockRef, Socket};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::super::dial::{Address, lost};
use super::super::link::{self, CONNECT_TIMEOUT};
use super::super::{DeliveryError, Reason, Secret};
use super::Message;
use super::judge::{During, confirmation, failure, too_large, transient};

/// How often a silent server is heard at least, in seconds; half as long again without is the end of the connection.
const HEARTBEAT: u16 = 20;
/// What a frame has around its content, in bytes.
const AROUND_FRAME: usize = 8;

/// Where a server is, and how to be let in.
#[derive(Debug)]
pub(super) struct Access {
    pub(super) address: Address,
    pub(super) vhost: String,
    pub(super) user: String,
    /// Read again at every connection.
    pub(super) password: Option<Secret>,
}

/// A connection that was made. What is under way when it ends fails.
pub(super) struct Connection {
    connection: lapin::Connection,
    /// Channels that no delivery has. Taken and given back by deliveries, and so never more than there were side by
    /// side.
    idle: Mutex<Vec<Channel>>,
    socket: Line,
    /// Set when no attempt is to go over it any more.
    spent: AtomicBool,
}

/// A second handle on the connection's socket, which the library's thread waits on for as long as that is open.
struct Line {
    socket: Socket,
    /// Whether the connection is made: from then on the library ends it, with a farewell.
    made: bool,
}

impl Line {
    /// Cuts it, which wakes and ends the library's thread.
    fn cut(&self) {
        // It may be cut already.
        let _cut = self.socket.shutdown(Shutdown::Both);
    }
}

impl Drop for Line {
    fn drop(&mut self) {
        if !self.made {
            self.cut();
        }
    }
}

impl link::Connection for Connection {
    fn is_usable(&self) -> bool {
        self.connection.status().connected() && !self.spent.load(Ordering::Relaxed)
    }
}

impl Connection {
    /// Connects and logs in.
    pub(super) async fn open(access: &Arc<Access>) -> Result<Self, DeliveryError> {
        let made = tokio::time::timeout(CONNECT_TIMEOUT, connect(access)).await;
        made.unwrap_or_else(|_| Err(transient(Reason::ConnectTimeout)))
    }

    /// No attempt is to go over it any more, unless the server has said that it reads nothing for now: a new one would
    /// be told the same, later.
    pub(super) fn give_up(&self) -> Option<DeliveryError> {
        if self.connection.status().blocked() {
            return Some(transient(Reason::Unavailable));
        }
        self.spent.store(true, Ordering::Relaxed);
        self.socket.cut();
        None
    }

    /// Publishes the messages of each round side by side, once those of the round before are confirmed.
    pub(super) async fn publish(
        &self,
        exchange: &ShortString,
        rounds: Vec<Vec<Message>>,
    ) -> Result<(), DeliveryError> {
        if self.connection.status().blocked() {
            return Err(transient(Reason::Unavailable));
        }
        let frame = usize::try_from(self.connection.configuration().frame_max()).unwrap_or(usize::MAX);
        let fits = |message: &Message| frame == 0 || message.head.saturating_add(AROUND_FRAME) <= frame;
        if !rounds.iter().flatten().all(fits) {
            return Err(too_large("its attributes are larger than the server's frame_max"));
        }
        let channel = self.channel().await?;
        for round in rounds {
            publish_round(&channel, exchange, round).await?;
        }
        self.idle.lock().push(channel);
        Ok(())
    }

    /// A channel that confirms, which nobody else uses. It closes with the value unless it is given back.
    async fn channel(&self) -> Result<Channel, DeliveryError> {
        loop {
            let Some(channel) = self.idle.lock().pop() else { break };
            if channel.status().connected() {
                return Ok(channel);
            }
        }
        let wrong = |error| failure(During::Publish, &error);
        let channel = self.connection.create_channel().await.map_err(wrong)?;
        channel.confirm_select(ConfirmSelectOptions::default()).await.map_err(wrong)?;
        Ok(channel)
    }
}

async fn publish_round(
    channel: &Channel,
    exchange: &ShortString,
    round: Vec<Message>,
) -> Result<(), DeliveryError> {
    let options = BasicPublishOptions { mandatory: true, immediate: false };
    let mut confirms = Vec::with_capacity(round.len());
    let mut failures = Vec::new();
    for Message { key, properties, payload, .. } in round {
        match channel.basic_publish(exchange.clone(), key, options, &payload, properties).await {
            Ok(confirm) => confirms.push(confirm),
            Err(error) => {
                failures.push(failure(During::Publish, &error));
                break;
            }
        }
    }
    for confirm in confirms {
        let outcome = confirm.await.map_err(|error| failure(During::Publish, &error));
        failures.extend(outcome.and_then(confirmation).err());
    }
    // A refusal closes the channel, which is all that those after it see.
    let first = failures.into_iter().min_by_key(|failure| match failure {
        DeliveryError::Misconfigured { .. } | DeliveryError::Closed { .. } => 0,
        DeliveryError::Rejected { .. } => 1,
        DeliveryError::Transient { .. } => 2,
    });
    first.map_or(Ok(()), Err)
}

async fn connect(access: &Access) -> Result<Connection, DeliveryError> {
    let config = access.address.client_config().await?;
    let stream = access.address.connect().await?;
    let socket = SockRef::from(&stream).try_clone().map_err(|error| lost(&error))?;
    let mut socket = Line { socket, made: false };
    let mut stream = AsyncTcpStream::Plain(Compat::new(stream));
    if let Some(config) = config {
        let connector = RustlsConnector::from(config);
        stream = stream.into_rustls(&connector, &access.address.host).await.map_err(|error| lost(&error))?;
    }
    let uri = AMQPUri {
        scheme: AMQPScheme::AMQP,
        authority: AMQPAuthority {
            userinfo: AMQPUserInfo {
                username: access.user.clone(),
                password: access
                    .password
                    .as_ref()
                    .map(|password| password.current().to_string())
                    .unwrap_or_default(),
            },
            host: access.address.host.clone(),
            port: access.address.port,
        },
        vhost: access.vhost.clone(),
        query: AMQPQueryString { heartbeat: Some(HEARTBEAT), ..AMQPQueryString::default() },
    };
    let properties = ConnectionProperties::default()
        .with_connection_name(concat!("aep-sidecar/", env!("CARGO_PKG_VERSION")).into());
    let wrong = |error| failure(During::Connect, &error);
    let runtime = lapin::runtime::default_runtime().map_err(wrong)?;
    // Once: the library is not to connect again.
    let stream = Mutex::new(Some(stream));
    let hand_over = async move |_, _| {
        let ended = || Error::from(ErrorKind::InvalidConnectionState(lapin::ConnectionState::Closed));
        stream.lock().take().ok_or_else(ended)
    };
    let connection =
        lapin::Connection::connector(uri, runtime, hand_over, properties).await.map_err(wrong)?;
    socket.made = true;
    Ok(Connection { connection, idle: Mutex::default(), socket, spent: AtomicBool::new(false) })
}
