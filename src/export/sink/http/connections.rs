//! The client with its connections, made anew when it is too old or a certificate has changed.

use std::io;
use std::path::Path;
use std::time::Duration;

use parking_lot::Mutex;
use reqwest::dns::{Addrs, Name, Resolve, Resolving};
use reqwest::{Certificate, Client, ClientBuilder, Identity, NoProxy, Proxy, Url};
use tokio::time::Instant;

use super::own::Http2;
use crate::export::sink::options::{Proxies, Tls};
use crate::export::sink::{BuildError, SinkOptions};

/// How long a connection may take to be made, its TLS handshake included.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// How long an unused connection is kept: less than common servers and balancers do.
const IDLE_TIMEOUT: Duration = Duration::from_secs(15);
/// How often an unused or silent connection is checked.
const KEEP_ALIVE: Duration = Duration::from_secs(15);
/// How often the certificates' files are looked at, at most.
const EVERY: Duration = Duration::from_secs(2);

/// A client, and what it is made of.
pub(super) struct Connections {
    plan: Plan,
    /// Guards the client that requests go through; whoever finds it too old replaces it.
    aging: Mutex<Aging>,
}

struct Plan {
    /// Whether the endpoint is reached by TLS. Without it root certificates aren't needed, and may not be there.
    secure: bool,
    attempt: Duration,
    max_age: Duration,
    files: Tls,
    also_trusted: Option<String>,
    proxies: Proxies,
    http2: Http2,
}

/// A client with its connections, and since when it has been used.
struct Aging {
    client: Client,
    since: Instant,
    /// What the files held that it was made of, and when they were last looked at.
    pem: Pem,
    looked: Instant,
    /// What was last told to be wrong with them.
    told: Option<String>,
}

/// What the certificates' files hold.
#[derive(Clone, Default, PartialEq, Eq)]
struct Pem {
    ca: Option<Vec<u8>>,
    /// The certificate with its chain, and its private key.
    identity: Option<Vec<u8>>,
}

impl Connections {
    /// Those of a sink's endpoint.
    pub(super) fn new(url: &Url, options: &SinkOptions, http2: Http2) -> Result<Self, BuildError> {
        let plan = Plan {
            secure: url.scheme() == "https",
            attempt: options.times.attempt,
            max_age: options.times.connection,
            files: options.tls.clone(),
            also_trusted: options.web.also_trusted.clone(),
            proxies: options.web.proxies.clone(),
            http2,
        };
        let pem = plan.read()?;
        let client = plan.client(&pem)?;
        let now = Instant::now();
        let aging = Mutex::new(Aging { client, since: now, pem, looked: now, told: None });
        Ok(Self { plan, aging })
    }

    /// Those of the endpoint that gives its tokens.
    pub(super) fn of_token_endpoint(url: &Url, options: &SinkOptions) -> Result<Self, BuildError> {
        Self::new(url, options, Http2::Auto)
    }

    /// The client that a request goes through. Requests under way on an old one's connections go on.
    pub(super) fn current(&self) -> Client {
        let now = Instant::now();
        let (aged, before) = {
            let mut aging = self.aging.lock();
            let aged = now.duration_since(aging.since) >= self.plan.max_age;
            let look = self.plan.has_files() && now.duration_since(aging.looked) >= EVERY;
            if !aged && !look {
                return aging.client.clone();
            }
            aging.looked = now;
            if aged {
                // Nobody else needs to make a new one meanwhile.
                aging.since = now;
            }
            (aged, aging.pem.clone())
        };
        // Files are read, and clients made, while no one waits for the lock.
        let (made, trouble) = match self.plan.read() {
            Ok(pem) if pem == before => (None, None),
            Ok(pem) => match self.plan.client(&pem) {
                Ok(client) => (Some((client, pem)), None),
                Err(error) => (None, Some(error.to_string())),
            },
            Err(error) => (None, Some(error.to_string())),
        };
        let renewed = made.is_some();
        // It could be built once; should it fail now, old connections are better than none.
        let made = made.or_else(|| {
            let client = aged.then(|| self.plan.client(&before))?;
            Some((client.ok()?, before))
        });
        let mut aging = self.aging.lock();
        if let Some((client, pem)) = made {
            (aging.client, aging.pem, aging.since) = (client, pem, now);
        }
        if renewed {
            tracing::info!("the sink's certificates have changed and are used from now on");
        }
        if aging.told != trouble {
            if let Some(trouble) = &trouble {
                tracing::error!(
                    trouble,
                    "the sink's certificates can't be reloaded: what was read before is used"
                );
            }
            aging.told = trouble;
        }
        aging.client.clone()
    }
}

impl Plan {
    /// Whether anything is reached by TLS, be it a proxy.
    fn is_secure(&self) -> bool {
        let mut proxies = self.proxies.http.iter().chain(&self.proxies.https);
        self.secure || proxies.any(|proxy| proxy.scheme() == "https")
    }

    fn has_files(&self) -> bool {
        self.files.ca.is_some() || self.files.identity.is_some()
    }

    fn read(&self) -> Result<Pem, BuildError> {
        let read = |path: &Path| {
            std::fs::read(path).map_err(|error| BuildError::File { path: path.to_owned(), error })
        };
        let identity = match &self.files.identity {
            Some((certificate, key)) => {
                let mut both = read(certificate)?;
                both.push(b'\n');
                both.extend(read(key)?);
                Some(both)
            }
            None => None,
        };
        Ok(Pem { ca: self.files.ca.as_deref().map(read).transpose()?, identity })
    }

    /// A client without connections yet.
    fn client(&self, pem: &Pem) -> Result<Client, BuildError> {
        // An error only means that a provider is installed already.
        drop(rustls::crypto::ring::default_provider().install_default());
        let client = Client::builder()
            .user_agent(concat!("aep-sidecar/", env!("CARGO_PKG_VERSION")))
            .redirect(reqwest::redirect::Policy::none())
            .referer(false)
            .connect_timeout(CONNECT_TIMEOUT)
            .timeout(self.attempt)
            .pool_idle_timeout(IDLE_TIMEOUT)
            .tcp_keepalive(KEEP_ALIVE)
            .http2_keep_alive_interval(KEEP_ALIVE)
            .http2_keep_alive_timeout(KEEP_ALIVE)
            .dns_resolver(SystemResolver);
        let client = match self.http2 {
            Http2::Auto => client,
            Http2::PriorKnowledge => client.http2_prior_knowledge(),
            Http2::Never => client.http1_only(),
        };
        let client = self.proxied(client)?;
        let client = self.trusting(client, pem.ca.as_deref())?;
        let Some(identity) = &pem.identity else {
            return client.build().map_err(|error| BuildError::Http(error.without_url()));
        };
        let unusable =
            |_| BuildError::setting("CERT", "and KEY must be a certificate and its own key, as PEM");
        client.identity(Identity::from_pem(identity).map_err(unusable)?).build().map_err(unusable)
    }

    /// Nothing but the configured proxies: the environment's are among them where they are wanted.
    fn proxied(&self, client: ClientBuilder) -> Result<ClientBuilder, BuildError> {
        let names: Vec<&str> = self.proxies.except.split(',').map(str::trim).collect();
        // The client takes an asterisk for any name, but not for any address.
        if names.contains(&"*") {
            return Ok(client.no_proxy());
        }
        // A name with all its subdomains is also written with an asterisk, which would match nothing here.
        let names: Vec<&str> = names.into_iter().map(|name| name.strip_prefix('*').unwrap_or(name)).collect();
        let except = NoProxy::from_string(&names.join(","));
        let unusable = |_| BuildError::setting("PROXY", "can't be used as a proxy");
        let mut client = client.no_proxy();
        if let Some(url) = &self.proxies.http {
            client = client.proxy(Proxy::http(url.clone()).map_err(unusable)?.no_proxy(except.clone()));
        }
        if let Some(url) = &self.proxies.https {
            client = client.proxy(Proxy::https(url.clone()).map_err(unusable)?.no_proxy(except));
        }
        Ok(client)
    }

    fn trusting(&self, client: ClientBuilder, ca: Option<&[u8]>) -> Result<ClientBuilder, BuildError> {
        let also = match &self.also_trusted {
            Some(text) => certificates("K_CA_CERTS", text.as_bytes())?,
            None => Vec::new(),
        };
        Ok(match ca {
            Some(ca) => client.tls_certs_only(certificates("CA", ca)?.into_iter().chain(also)),
            None if self.is_secure() => client.tls_certs_merge(also),
            None => client.tls_certs_only(also),
        })
    }
}

/// The certificates of a PEM text, at least one.
fn certificates(what: &str, pem: &[u8]) -> Result<Vec<Certificate>, BuildError> {
    let found = Certificate::from_pem_bundle(pem).ok().filter(|found| !found.is_empty());
    found.ok_or_else(|| BuildError::setting(what, "must hold certificates as PEM"))
}

/// Resolves with the system's resolver, at every new connection, with an error that can be told.
struct SystemResolver;

/// A name that can't be resolved.
#[derive(Debug, thiserror::Error)]
#[error("the host's name can't be resolved")]
pub(super) struct UnknownHost(#[source] pub(super) io::Error);

impl Resolve for SystemResolver {
    fn resolve(&self, name: Name) -> Resolving {
        Box::pin(async move {
            match tokio::net::lookup_host((name.as_str(), 0)).await {
                Ok(found) => Ok(Box::new(found.collect::<Vec<_>>().into_iter()) as Addrs),
                Err(error) => Err(Box::new(UnknownHost(error)).into()),
            }
        })
    }
}
