//! One connection that all attempts share, made when one needs it.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Mutex;
use tokio::time::Instant;

use super::DeliveryError;

/// How long a connection may take to be made, with TLS handshake and login.
pub(super) const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// A connection that can end.
pub(super) trait Connection {
    /// Whether a new attempt may still go over it.
    fn is_usable(&self) -> bool;
}

/// One connection that all attempts share, made when one needs it.
pub(super) struct Link<C> {
    /// Guards the connection, and is held while one is made: the other attempts wait for the same one.
    state: Mutex<State<C>>,
}

struct State<C> {
    connection: Option<Arc<C>>,
    /// Why the last one couldn't be made, and when that was known.
    failure: Option<(Instant, DeliveryError)>,
}

impl<C: Connection> Link<C> {
    pub(super) fn new() -> Self {
        Self { state: Mutex::new(State { connection: None, failure: None }) }
    }

    /// The connection, which `connect` makes when there is none. Whoever waited for a connection that couldn't be
    /// made is told why, and tries no other.
    pub(super) async fn connection<F>(&self, connect: impl FnOnce() -> F) -> Result<Arc<C>, DeliveryError>
    where
        F: Future<Output = Result<C, DeliveryError>>,
    {
        let asked = Instant::now();
        let mut state = self.state.lock().await;
        if let Some(connection) = &state.connection
            && connection.is_usable()
        {
            return Ok(Arc::clone(connection));
        }
        state.connection = None;
        if let Some((when, error)) = &state.failure
            && *when > asked
        {
            return Err(error.clone());
        }
        match connect().await {
            Ok(connection) => {
                let connection = Arc::new(connection);
                state.connection = Some(Arc::clone(&connection));
                state.failure = None;
                Ok(connection)
            }
            Err(error) => {
                state.failure = Some((Instant::now(), error.clone()));
                Err(error)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

    use super::super::Reason;
    use super::*;

    struct Fake(AtomicBool);

    impl Connection for Fake {
        fn is_usable(&self) -> bool {
            self.0.load(Ordering::Relaxed)
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_connection_is_shared_until_it_ends() {
        let link = Link::new();
        let connect = || async { Ok(Fake(AtomicBool::new(true))) };
        let (one, two) = (link.connection(connect).await.unwrap(), link.connection(connect).await.unwrap());
        assert!(Arc::ptr_eq(&one, &two));
        one.0.store(false, Ordering::Relaxed);
        let three = link.connection(connect).await.unwrap();
        assert!(!Arc::ptr_eq(&one, &three));
    }

    #[tokio::test(start_paused = true)]
    async fn those_who_wait_share_a_failure_and_the_next_one_tries_again() {
        let link = Link::<Fake>::new();
        let tries = AtomicUsize::new(0);
        let connect = || async {
            tries.fetch_add(1, Ordering::Relaxed);
            tokio::time::sleep(CONNECT_TIMEOUT).await;
            Err(DeliveryError::Transient { reason: Reason::ConnectTimeout, retry_after: None })
        };
        let (one, two) = tokio::join!(link.connection(connect), link.connection(connect));
        assert_eq!((one.err(), tries.load(Ordering::Relaxed)), (two.err(), 1));
        tokio::time::advance(Duration::from_millis(1)).await;
        assert!(link.connection(connect).await.is_err());
        assert_eq!(tries.load(Ordering::Relaxed), 2);
    }
}
