//! Which events are known already.

use std::hash::{BuildHasher, RandomState};
use std::num::NonZeroUsize;

use lru::LruCache;
use siphasher::sip128::{Hasher128, SipHasher13};
use std::hash::Hasher;

use crate::aep::position::SessionKey;
use crate::aep::{Event, EventKey};

/// A 128-bit fingerprint of two strings. Two different pairs share one with a chance of 2^-128, and nobody
/// without the [`FingerprintKey`] can search for such pairs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Fingerprint(pub u128);

/// The secret key of fingerprints: SipHash-1-3 with 128 bits of output. Fingerprints taken under one key
/// mean nothing under another, so that the key is kept with them.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct FingerprintKey(pub [u8; 16]);

impl std::fmt::Debug for FingerprintKey {
    /// The key stays secret.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("FingerprintKey(…)")
    }
}

impl FingerprintKey {
    /// A fresh random key, drawn from the operating system through the standard library's hash keys.
    #[must_use]
    pub fn random() -> Self {
        let half = || u128::from(RandomState::new().build_hasher().finish());
        Self(((half() << 64) | half()).to_le_bytes())
    }

    /// The fingerprint of `(source, id)`.
    #[must_use]
    pub fn event(&self, key: EventKey<'_>) -> Fingerprint {
        self.pair(0, key.source, key.id)
    }

    /// The fingerprint of `(source, session)`.
    #[must_use]
    pub fn session(&self, key: SessionKey<'_>) -> Fingerprint {
        self.pair(1, key.source, key.session)
    }

    /// The kind and the first string's length go first, so that no two pairs are the same bytes.
    fn pair(&self, kind: u8, first: &str, second: &str) -> Fingerprint {
        let mut hasher = SipHasher13::new_with_key(&self.0);
        hasher.write(&[kind]);
        hasher.write(&u64::try_from(first.len()).unwrap_or(u64::MAX).to_le_bytes());
        hasher.write(first.as_bytes());
        hasher.write(second.as_bytes());
        Fingerprint(hasher.finish128().as_u128())
    }
}

/// The events that were handled last, by `(source, id)`: a bounded memory that forgets the least recently
/// seen first. A fingerprint takes about 64 bytes.
#[derive(Debug)]
pub struct Seen {
    key: FingerprintKey,
    bound: usize,
    /// Never longer than `bound`. Not bounded by itself, since it would allocate the whole bound at once.
    known: LruCache<Fingerprint, ()>,
}

impl Seen {
    /// An empty memory of at most `bound` events.
    #[must_use]
    pub fn new(bound: NonZeroUsize, key: FingerprintKey) -> Self {
        Self { key, bound: bound.get(), known: LruCache::unbounded() }
    }

    /// The key that the fingerprints are taken under.
    #[must_use]
    pub fn key(&self) -> FingerprintKey {
        self.key
    }

    /// The fingerprint of an event.
    #[must_use]
    pub fn fingerprint(&self, event: &Event) -> Fingerprint {
        self.key.event(event.key())
    }

    /// Remembers an event, as the most recent: whether it is new.
    pub fn insert(&mut self, event: Fingerprint) -> bool {
        let new = self.known.put(event, ()).is_none();
        if self.known.len() > self.bound {
            self.known.pop_lru();
        }
        new
    }

    /// Whether an event is known. It becomes the most recent.
    pub fn recall(&mut self, event: Fingerprint) -> bool {
        self.known.get(&event).is_some()
    }

    /// How many events are known.
    #[must_use]
    pub fn len(&self) -> usize {
        self.known.len()
    }

    /// Whether none is known.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.known.is_empty()
    }

    /// The known events, oldest first.
    pub fn iter(&self) -> impl Iterator<Item = Fingerprint> {
        self.known.iter().rev().map(|(event, ())| *event)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seen(bound: usize) -> Seen {
        Seen::new(NonZeroUsize::new(bound).unwrap(), FingerprintKey([7; 16]))
    }

    #[test]
    fn source_and_id_are_kept_apart() {
        let key = FingerprintKey::random();
        let event = |source, id| key.event(EventKey { source, id });
        assert_ne!(event("ab", "c"), event("a", "bc"));
        assert_eq!(event("ab", "c"), event("ab", "c"));
        assert_ne!(event("a", "b"), key.session(SessionKey { source: "a", session: "b" }));
        assert_ne!(event("a", "b"), FingerprintKey::random().event(EventKey { source: "a", id: "b" }));
    }

    #[test]
    fn the_least_recently_seen_is_forgotten_first() {
        let mut seen = seen(2);
        assert!(seen.insert(Fingerprint(1)));
        assert!(seen.insert(Fingerprint(2)));
        assert!(!seen.insert(Fingerprint(1)));
        assert!(seen.insert(Fingerprint(3)), "forgets 2");
        assert!(seen.recall(Fingerprint(1)));
        assert!(!seen.recall(Fingerprint(2)));
        assert_eq!(seen.iter().collect::<Vec<_>>(), [Fingerprint(3), Fingerprint(1)]);
    }

    #[test]
    fn a_huge_bound_allocates_nothing() {
        assert!(seen(usize::MAX).is_empty());
    }

    #[test]
    fn the_key_is_never_printed() {
        assert!(!format!("{:?}", seen(1)).contains("7, 7"));
    }
}
