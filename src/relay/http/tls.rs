//! TLS on the listener: a certificate and its key, which may be replaced while connections are open.
//!
//! A pair is checked before it counts, so that a broken renewal changes nothing. With a pair its settings are
//! replaced as a whole: no session of an old pair is resumed under a new one. Connections that are open keep the
//! pair that they began with.

use std::fmt;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::RwLock;
use rustls::crypto::ring;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::version::{TLS12, TLS13};
use rustls::{InconsistentKeys, ServerConfig};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;

/// What a listener needs to speak TLS 1.2 and 1.3. Cloning shares it.
#[derive(Clone)]
pub struct Tls {
    /// Guards the pair that the next connection gets; [`Tls::replace`] swaps it.
    current: Arc<RwLock<Arc<ServerConfig>>>,
}

/// Why a certificate and its key can't be used. The text never repeats what is in them.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// The one isn't a chain of certificates.
    #[error("the certificate must be PEM with at least one section CERTIFICATE")]
    Certificate,
    /// The other isn't a private key.
    #[error("the key must be PEM with a section PRIVATE KEY, RSA PRIVATE KEY or EC PRIVATE KEY")]
    Key,
    /// Each is fine, but they aren't a pair.
    #[error("the key is not the certificate's")]
    Mismatch,
    /// Their contents can't be read, or are of a kind that isn't supported.
    #[error("the certificate and the key can't be used: {0}")]
    Unusable(#[source] rustls::Error),
}

impl Tls {
    /// Serves with a certificate, followed by the rest of its chain, and with its key; both are PEM.
    ///
    /// # Errors
    /// When they can't be used together.
    pub fn new(certificate: &[u8], key: &[u8]) -> Result<Self, TlsError> {
        let config = Arc::new(config(certificate, key)?);
        Ok(Self { current: Arc::new(RwLock::new(config)) })
    }

    /// Serves connections from now on with another pair.
    ///
    /// # Errors
    /// When they can't be used together; the pair before stays.
    pub fn replace(&self, certificate: &[u8], key: &[u8]) -> Result<(), TlsError> {
        let config = Arc::new(config(certificate, key)?);
        *self.current.write() = config;
        Ok(())
    }

    /// Shakes hands with a peer, which has `patience` for it.
    pub(super) async fn accept<S: AsyncRead + AsyncWrite + Unpin>(
        &self,
        stream: S,
        patience: Duration,
    ) -> io::Result<TlsStream<S>> {
        let config = Arc::clone(&self.current.read());
        tokio::time::timeout(patience, TlsAcceptor::from(config).accept(stream)).await?
    }
}

impl fmt::Debug for Tls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Tls(…)")
    }
}

fn config(certificate: &[u8], key: &[u8]) -> Result<ServerConfig, TlsError> {
    // What the reader of PEM says of an error repeats a line, which may be of a key.
    let chain = CertificateDer::pem_slice_iter(certificate).collect::<Result<Vec<_>, _>>();
    let chain = chain.ok().filter(|chain| !chain.is_empty()).ok_or(TlsError::Certificate)?;
    let key = PrivateKeyDer::from_pem_slice(key).map_err(|_| TlsError::Key)?;
    let mut config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_protocol_versions(&[&TLS13, &TLS12])
        .map_err(TlsError::Unusable)?
        .with_no_client_auth()
        .with_single_cert(chain, key)
        .map_err(|error| match error {
            rustls::Error::InconsistentKeys(InconsistentKeys::KeyMismatch) => TlsError::Mismatch,
            error => TlsError::Unusable(error),
        })?;
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(config)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A certificate and its key.
    fn pair() -> (String, String) {
        let made = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
        (made.cert.pem(), made.signing_key.serialize_pem())
    }

    #[test]
    fn only_a_certificate_with_its_own_key_is_taken() {
        let (certificate, key) = pair();
        let tls = Tls::new(certificate.as_bytes(), key.as_bytes()).unwrap();
        let before = Arc::clone(&tls.current.read());
        let (_, other) = pair();
        let cut = key.get(..key.len() / 2).unwrap();
        let garbled = key.replace("PRIVATE KEY-----\n", "PRIVATE KEY-----\n!");
        let garbage = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n";
        for (certificate, key, problem) in [
            (certificate.as_str(), other.as_str(), "the key is not the certificate's"),
            ("", &key, "the certificate must be"),
            (&key, &key, "the certificate must be"),
            (&certificate, "", "the key must be"),
            (&certificate, &certificate, "the key must be"),
            (&certificate, cut, "the key must be"),
            (&certificate, &garbled, "the key must be"),
            (garbage, &key, "the certificate and the key can't be used"),
        ] {
            let error = tls.replace(certificate.as_bytes(), key.as_bytes()).unwrap_err().to_string();
            assert!(error.starts_with(problem), "{error}");
        }
        assert!(Arc::ptr_eq(&before, &tls.current.read()), "the pair before stays");
        let (certificate, key) = pair();
        tls.replace(certificate.as_bytes(), key.as_bytes()).unwrap();
        assert!(!Arc::ptr_eq(&before, &tls.current.read()));
    }

    #[tokio::test(start_paused = true)]
    async fn a_peer_that_does_not_shake_hands_is_given_up() {
        let (certificate, key) = pair();
        let tls = Tls::new(certificate.as_bytes(), key.as_bytes()).unwrap();
        let (near, _far) = tokio::io::duplex(1024);
        let start = tokio::time::Instant::now();
        let patience = Duration::from_secs(30);
        let error = tls.accept(near, patience).await.unwrap_err();
        assert_eq!((error.kind(), start.elapsed()), (io::ErrorKind::TimedOut, patience));
    }
}
