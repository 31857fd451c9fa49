//! A connection over TCP, with TLS where it is asked for, for protocols whose libraries are handed one.

use std::fs;
use std::io;
use std::path::Path;

use reqwest::Url;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{ClientConfig, RootCertStore};
use tokio::net::TcpStream;

use super::http::{Phase, failure_in};
use super::options::Tls;
use super::{DeliveryError, Reason};

/// Where a server is, and how it is spoken to.
#[derive(Debug)]
pub(super) struct Address {
    /// A name or an address, without brackets.
    pub(super) host: String,
    pub(super) port: u16,
    /// Whom to trust, where it is spoken to over TLS.
    pub(super) tls: Option<Tls>,
}

impl Address {
    /// The URL's host and port, which is 443 or the like where it names none.
    pub(super) fn of(url: &Url, port: u16, tls: Option<Tls>) -> Self {
        Self {
            host: url.host_str().unwrap_or_default().trim_matches(['[', ']']).to_owned(),
            port: url.port().unwrap_or(port),
            tls,
        }
    }

    /// Connects over TCP to the first of the name's addresses that answers.
    pub(super) async fn connect(&self) -> Result<TcpStream, DeliveryError> {
        let dns = |_| DeliveryError::Transient { reason: Reason::Dns, retry_after: None };
        let addresses = tokio::net::lookup_host((self.host.as_str(), self.port)).await.map_err(dns)?;
        let mut stream = Err(io::Error::from(io::ErrorKind::HostUnreachable));
        for address in addresses {
            stream = TcpStream::connect(address).await;
            if stream.is_ok() {
                break;
            }
        }
        stream.and_then(|stream| stream.set_nodelay(true).map(|()| stream)).map_err(|error| lost(&error))
    }

    /// How to speak TLS, with the certificates as the files hold them now; `None` where TLS isn't spoken.
    pub(super) async fn client_config(&self) -> Result<Option<ClientConfig>, DeliveryError> {
        let Some(tls) = self.tls.clone() else { return Ok(None) };
        match tokio::task::spawn_blocking(move || client_config(&tls)).await {
            Ok(Ok(config)) => Ok(Some(config)),
            Ok(Err(_)) | Err(_) => Err(DeliveryError::Misconfigured { reason: Reason::Certificate }),
        }
    }
}

/// What it means that a connection couldn't be made.
pub(super) fn lost(error: &(dyn std::error::Error + 'static)) -> DeliveryError {
    failure_in(Phase::Connect, error).into()
}

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
    let provider = std::sync::Arc::new(rustls::crypto::ring::default_provider());
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
