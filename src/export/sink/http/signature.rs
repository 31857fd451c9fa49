//! Signatures by which an endpoint tells who sent a request.
//!
//! What is signed is the body as it is on the wire, together with an id and the time of the attempt. In binary mode
//! that leaves out the context attributes.
//!
//! Spec: Standard Webhooks 1.0.0, "Signature scheme".

use std::time::SystemTime;

use base64::Engine as _;
use base64::engine::general_purpose::{STANDARD, URL_SAFE_NO_PAD};
use reqwest::header::{HeaderMap, HeaderValue};
use ring::{digest, hmac};

use super::derived::Derived;
use crate::aep::Event;
use crate::aep::envelope::Attribute;
use crate::export::sink::{BuildError, Secret};

/// What a secret starts with.
const PREFIX: &str = "whsec_";
/// How long its bytes may be.
const LENGTHS: std::ops::RangeInclusive<usize> = 24..=64;

/// Signs requests.
pub(super) struct Signing(Derived<Vec<hmac::Key>>);

impl Signing {
    pub(super) fn new(secret: Secret) -> Result<Self, BuildError> {
        Derived::new(secret, "WEBHOOK_SECRET", keys).map(Self)
    }

    /// Adds the three headers.
    pub(super) fn sign(&self, id: &str, now: SystemTime, body: &[u8], headers: &mut HeaderMap) {
        let seconds = now.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs();
        let start = format!("{id}.{seconds}.");
        let mut signatures = String::new();
        for key in self.0.current().iter() {
            let mut context = hmac::Context::with_key(key);
            context.update(start.as_bytes());
            context.update(body);
            if !signatures.is_empty() {
                signatures.push(' ');
            }
            signatures.push_str("v1,");
            STANDARD.encode_string(context.sign(), &mut signatures);
        }
        let text = |text: &str| HeaderValue::from_str(text).ok();
        let all = [("webhook-id", text(id)), ("webhook-signature", text(&signatures))];
        headers.insert("webhook-timestamp", HeaderValue::from(seconds));
        // All of it is Base64, digits and punctuation: each is a header's value.
        headers.extend(
            all.into_iter()
                .filter_map(|(name, value)| Some((reqwest::header::HeaderName::from_static(name), value?))),
        );
    }
}

/// The keys of secrets that are separated by spaces.
fn keys(text: &str) -> Result<Vec<hmac::Key>, &'static str> {
    const MUST: &str = "must be whsec_ and 24 to 64 bytes as Base64; several separated by spaces";
    let key = |word: &str| {
        let bytes = STANDARD.decode(word.strip_prefix(PREFIX).unwrap_or(word)).ok()?;
        LENGTHS.contains(&bytes.len()).then(|| hmac::Key::new(hmac::HMAC_SHA256, &bytes))
    };
    let keys: Option<Vec<_>> = text.split_ascii_whitespace().map(key).collect();
    keys.filter(|keys| !keys.is_empty()).ok_or(MUST)
}

/// The id of a request: the same for the same events at every attempt, and another for any others. Each part counts
/// with its length, so that no two lists of events run together to the same text.
pub(super) fn id(events: &[Event]) -> String {
    let mut context = digest::Context::new(&digest::SHA256);
    for event in events {
        for attribute in [Attribute::Source, Attribute::Id] {
            let part = event.string(attribute).unwrap_or_default();
            context.update(&u64::try_from(part.len()).unwrap_or(u64::MAX).to_le_bytes());
            context.update(part.as_bytes());
        }
    }
    format!("msg_{}", URL_SAFE_NO_PAD.encode(context.finish()))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_signature_is_that_of_the_public_example() {
        let secret = Secret::fixed("whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw");
        let signing = Signing::new(secret).unwrap();
        let mut headers = HeaderMap::new();
        let now = SystemTime::UNIX_EPOCH + Duration::from_secs(1_614_265_330);
        signing.sign("msg_p5jXN8AQM9LWM0D4loKWxJek", now, br#"{"test": 2432232314}"#, &mut headers);
        assert_eq!(headers["webhook-signature"], "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=");
        assert_eq!(headers["webhook-timestamp"], "1614265330");
    }

    #[test]
    fn a_secret_of_another_form_is_refused() {
        let one = STANDARD.encode([7; 32]);
        assert_eq!(keys(&one).unwrap().len(), 1);
        assert_eq!(keys(&format!("whsec_{one} {one}")).unwrap().len(), 2);
        for bad in ["", " ", "whsec_", "hunter2", &STANDARD.encode([7; 23]), &STANDARD.encode([7; 65])] {
            assert!(keys(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn ids_are_of_the_events_and_of_no_others() {
        let event = |source: &str, id: &str| {
            Event::parse_str(&format!(
                r#"{{"aep":"0.1","id":"{id}","type":"run.started","time":"2026-07-03T10:14:01Z","source":"{source}","agent":"a","session":"s","seq":1}}"#
            ))
            .unwrap()
        };
        let lists: Vec<Vec<Event>> = vec![
            vec![event("aep://h", "1")],
            vec![event("aep://h1", "1")],
            vec![event("aep://h", "11")],
            vec![event("aep://h", "1"), event("aep://h", "1")],
            vec![event("aep://h", "1"), event("aep://h", "2")],
            vec![event("aep://h", "2"), event("aep://h", "1")],
        ];
        let ids: std::collections::HashSet<String> = lists.iter().map(|events| id(events)).collect();
        assert_eq!(ids.len(), lists.len());
        assert_eq!(id(&lists[0]), id(&[event("aep://h", "1")]));
        assert!(ids.iter().all(|id| id.len() == 47 && !id.contains('.')));
    }
}
