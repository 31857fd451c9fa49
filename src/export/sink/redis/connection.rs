//! One connection to a Redis server, which ends rather than being remade behind the sink's back.

use std::fs;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use redis::aio::MultiplexedConnection;
use redis::{Arg, AsyncConnectionConfig, Cmd, RedisConnectionInfo};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio_rustls::TlsConnector;

use super::super::http::{Phase, failure_in};
use super::super::link::{self, CONNECT_TIMEOUT};
use super::super::options::Tls;
use super::super::{DeliveryError, Reason, Secret};
use super::{answer, verdict};

/// Where a server is, and how to be let in.
#[derive(Debug)]
pub(super) struct Access {
    pub(super) host: String,
    pub(super) port: u16,
    /// How to trust the server, when it is spoken to over TLS.
    pub(super) tls: Option<Tls>,
    pub(super) user: Option<String>,
    /// Read again at every connection.
    pub(super) password: Option<Secret>,
    pub(super) database: u32,
}

/// A connection that was made. What is under way when it ends fails.
pub(super) struct Connection {
    commands: MultiplexedConnection,
    /// The longest part of a command that the server reads, in bytes; at a longer one it hangs up.
    longest: usize,
    /// Set when no attempt is to go over it any more.
    spent: AtomicBool,
    /// Reads and writes. Ends with this value, and the socket with it.
    _driver: JoinSet<()>,
}

impl link::Connection for Connection {
    fn is_usable(&self) -> bool {
        !self.spent.load(Ordering::Relaxed)
    }
}

impl Connection {
    /// Connects and logs in.
    pub(super) async fn open(access: &Arc<Access>) -> Result<Self, DeliveryError> {
        tokio::time::timeout(CONNECT_TIMEOUT, connect(access)).await.unwrap_or({
            Err(DeliveryError::Transient { reason: Reason::ConnectTimeout, retry_after: None })
        })
    }

    /// No attempt is to go over it any more.
    pub(super) fn give_up(&self) {
        self.spent.store(true, Ordering::Relaxed);
    }

    /// Has the commands executed, all or none.
    pub(super) async fn add(&self, entries: &[Cmd]) -> Result<(), DeliveryError> {
        let parts = entries.iter().flat_map(Cmd::args_iter);
        if parts.into_iter().any(|part| matches!(part, Arg::Simple(bytes) if bytes.len() > self.longest)) {
            let detail = "larger than the server's proto-max-bulk-len".to_owned();
            return Err(DeliveryError::Rejected { reason: Reason::TooLarge, status: None, detail });
        }
        let mut commands = self.commands.clone();
        let outcome = match entries {
            [one] => one.query_async::<String>(&mut commands).await.map(|_| 1),
            several => {
                let mut transaction = redis::pipe();
                transaction.atomic();
                for entry in several {
                    transaction.add_command(entry.clone());
                }
                transaction.query_async::<Vec<String>>(&mut commands).await.map(|ids| ids.len())
            }
        };
        match outcome {
            Ok(added) if added == entries.len() => Ok(()),
            Ok(_) => Err(DeliveryError::Misconfigured { reason: Reason::Protocol }),
            Err(error) => {
                // It may have ended; and where the server has become a replica, its name leads to another by now.
                self.give_up();
                Err(verdict(error))
            }
        }
    }
}

async fn connect(access: &Access) -> Result<Connection, DeliveryError> {
    let dns = |_| DeliveryError::Transient { reason: Reason::Dns, retry_after: None };
    let addresses = tokio::net::lookup_host((access.host.as_str(), access.port)).await.map_err(dns)?;
    let mut stream = Err(io::Error::from(io::ErrorKind::HostUnreachable));
    for address in addresses {
        stream = TcpStream::connect(address).await;
        if stream.is_ok() {
            break;
        }
    }
    let stream = stream.and_then(|stream| stream.set_nodelay(true).map(|()| stream)).map_err(|e| lost(&e))?;
    let Some(tls) = access.tls.clone() else { return log_in(access, stream).await };
    let untrusted = DeliveryError::Misconfigured { reason: Reason::Certificate };
    let config = tokio::task::spawn_blocking(move || client_config(&tls)).await;
    let (Ok(Ok(config)), Ok(name)) = (config, ServerName::try_from(access.host.clone())) else {
        return Err(untrusted);
    };
    let stream = TlsConnector::from(Arc::new(config)).connect(name, stream).await.map_err(|e| lost(&e))?;
    log_in(access, stream).await
}

async fn log_in<S>(access: &Access, mut stream: S) -> Result<Connection, DeliveryError>
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    greet(&mut stream, access.password.is_some()).await?;
    let mut info = RedisConnectionInfo::default().set_skip_set_lib_name().set_db(i64::from(access.database));
    if let Some(user) = &access.user {
        info = info.set_username(user);
    }
    if let Some(password) = &access.password {
        info = info.set_password(password.current());
    }
    // The attempt as a whole has its bound already.
    let config = AsyncConnectionConfig::new().set_connection_timeout(None).set_response_timeout(None);
    let (commands, driver) =
        MultiplexedConnection::new_with_config(&info, stream, config).await.map_err(verdict)?;
    let mut driving = JoinSet::new();
    driving.spawn(driver);
    let longest = longest(&mut commands.clone()).await;
    Ok(Connection { commands, longest, spent: AtomicBool::new(false), _driver: driving })
}

/// Asks for a first word, which shows what is wrong with the connection while that can be told: that the server
/// doesn't trust the client's certificate is said after the TLS handshake, and a server that wants a login answers
/// a long command by hanging up.
async fn greet<S>(stream: &mut S, has_password: bool) -> Result<(), DeliveryError>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    /// More than any first word takes, in bytes.
    const LONGEST: usize = 1024;
    // Where it has hung up, what it said before can still be read.
    drop(stream.write_all(b"*1\r\n$4\r\nPING\r\n").await);
    let mut line = Vec::new();
    while line.last() != Some(&b'\n') && line.len() < LONGEST {
        // The rest of the stream belongs to the client: not a byte more.
        line.push(stream.read_u8().await.map_err(|error| lost(&error))?);
    }
    let line = String::from_utf8_lossy(&line);
    match line.trim_end().strip_prefix('-').map(|said| said.split_once(' ').unwrap_or((said, ""))) {
        // Those may change with the login.
        Some(("NOAUTH" | "NOPERM", _)) if has_password => Ok(()),
        Some((code, said)) => answer(code, said).map_or(Ok(()), Err),
        None => Ok(()),
    }
}

/// What the server says that it reads at most; its default where it doesn't say, as to a user without the permission.
async fn longest(commands: &mut MultiplexedConnection) -> usize {
    /// 512 MiB.
    const DEFAULT: usize = 512 << 20;
    let mut asked = redis::cmd("CONFIG");
    asked.arg("GET").arg("proto-max-bulk-len");
    let said = asked.query_async::<Vec<String>>(commands).await.unwrap_or_default();
    said.get(1).and_then(|bytes| bytes.parse().ok()).unwrap_or(DEFAULT)
}

fn lost(error: &(dyn std::error::Error + 'static)) -> DeliveryError {
    failure_in(Phase::Connect, error).into()
}

/// The certificates as the files hold them now.
fn client_config(tls: &Tls) -> io::Result<ClientConfig> {
    let mut roots = RootCertStore::empty();
    match &tls.ca {
        Some(path) => {
            for certificate in certificates(path)? {
                roots.add(certificate).map_err(io::Error::other)?;
            }
        }
        None => drop(roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs)),
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(io::Error::other)?
        .with_root_certificates(roots);
    match &tls.identity {
        None => Ok(builder.with_no_client_auth()),
        Some((certificate, key)) => {
            let key = PrivateKeyDer::from_pem_slice(&fs::read(key)?).map_err(io::Error::other)?;
            builder.with_client_auth_cert(certificates(certificate)?, key).map_err(io::Error::other)
        }
    }
}

fn certificates(path: &Path) -> io::Result<Vec<CertificateDer<'static>>> {
    CertificateDer::pem_slice_iter(&fs::read(path)?).collect::<Result<_, _>>().map_err(io::Error::other)
}
