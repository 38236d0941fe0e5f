//! CHAP: the initiator proves that it knows a secret, and the target may have to prove that it knows another one
//! (RFC 7143 section 12.1.3, RFC 1994).

use md5::{Digest as _, Md5};
use zeroize::Zeroizing;

use super::super::text::{self, Pair};

/// Bytes of a challenge.
pub(crate) const CHALLENGE_BYTES: usize = 16;
/// Longest challenge of an initiator.
const CHALLENGE_BYTES_MAX: usize = 1024;
/// Shortest secret: "random CHAP secrets of at least 96 bits".
const SECRET_BYTES_MIN: usize = 12;
const SECRET_BYTES_MAX: usize = 255;

/// A secret. Its memory is overwritten when it is dropped.
#[derive(Clone, PartialEq, Eq)]
pub struct ChapSecret(Zeroizing<Vec<u8>>);

impl std::fmt::Debug for ChapSecret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("ChapSecret")
    }
}

impl ChapSecret {
    /// Accepts a secret of 12 to 255 bytes; `None` for another length.
    pub fn new(secret: &[u8]) -> Option<Self> {
        (SECRET_BYTES_MIN..=SECRET_BYTES_MAX)
            .contains(&secret.len())
            .then(|| Self(Zeroizing::new(secret.to_vec())))
    }
}

/// A name and its secret.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChapUser {
    /// The name, as CHAP sends it.
    pub name: String,
    /// The secret.
    pub secret: ChapSecret,
}

/// How initiators are authenticated.
#[derive(Debug, Clone, Default)]
pub enum Authentication {
    /// Not at all.
    #[default]
    None,
    /// By CHAP.
    Chap {
        /// The users that may log in.
        users: Vec<ChapUser>,
        /// The identity of the target, if initiators may ask for it.
        target: Option<ChapUser>,
    },
}

/// A hash algorithm of CHAP.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Algorithm {
    Md5,
    Sha256,
}

impl Algorithm {
    /// Chooses the best of the offered algorithms, by their numbers.
    fn choose(offers: &str) -> Option<Self> {
        let is_offered = |number: u64| offers.split(',').any(|offer| text::number(offer) == Some(number));
        if is_offered(7) {
            Some(Self::Sha256)
        } else {
            is_offered(5).then_some(Self::Md5)
        }
    }

    fn number(self) -> &'static str {
        match self {
            Self::Md5 => "5",
            Self::Sha256 => "7",
        }
    }

    fn response(self, identifier: u8, secret: &ChapSecret, challenge: &[u8]) -> Vec<u8> {
        let message = Zeroizing::new([&[identifier][..], &secret.0, challenge].concat());
        match self {
            Self::Md5 => Md5::digest(&*message).to_vec(),
            Self::Sha256 => aws_lc_rs::digest::digest(&aws_lc_rs::digest::SHA256, &message)
                .as_ref()
                .to_vec(),
        }
    }
}

/// Random values for one authentication.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ChallengeSeed {
    pub(crate) identifier: u8,
    pub(crate) challenge: [u8; CHALLENGE_BYTES],
}

/// The progress of an authentication.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum ChapState {
    /// The next request offers algorithms.
    Begin,
    /// The challenge was sent.
    Challenged(Challenge),
    /// The initiator has proved its identity.
    Done,
}

/// A challenge that was sent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Challenge {
    algorithm: Algorithm,
    identifier: u8,
    bytes: [u8; CHALLENGE_BYTES],
}

/// Why an authentication failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ChapFailure {
    /// The request lacks a key, or a value is not valid.
    Malformed,
    /// No user has this name and secret.
    Refused,
}

impl ChapState {
    /// Handles the keys of one request, appends the answer, and returns the name of the user when the initiator has
    /// proved to know the secret.
    pub(crate) fn step(
        &mut self,
        pairs: &[Pair<'_>],
        users: &[ChapUser],
        target: Option<&ChapUser>,
        seed: ChallengeSeed,
        answer: &mut Vec<u8>,
    ) -> Result<Option<String>, ChapFailure> {
        let value = |key: &str| pairs.iter().find(|pair| pair.key == key).map(|pair| pair.value);
        match self {
            Self::Begin => {
                let offers = value("CHAP_A").ok_or(ChapFailure::Malformed)?;
                let algorithm = Algorithm::choose(offers).ok_or(ChapFailure::Malformed)?;
                text::push(answer, "CHAP_A", algorithm.number());
                text::push(answer, "CHAP_I", &seed.identifier.to_string());
                text::push(answer, "CHAP_C", &text::to_hexadecimal(&seed.challenge));
                *self = Self::Challenged(Challenge {
                    algorithm,
                    identifier: seed.identifier,
                    bytes: seed.challenge,
                });
                Ok(None)
            }
            Self::Challenged(challenge) => {
                let name = value("CHAP_N").ok_or(ChapFailure::Malformed)?;
                let response = value("CHAP_R").ok_or(ChapFailure::Malformed)?;
                let response = text::binary(response, CHALLENGE_BYTES_MAX).ok_or(ChapFailure::Malformed)?;
                let user = users.iter().find(|user| user.name == name);
                let user = user.ok_or(ChapFailure::Refused)?;
                let expected = challenge
                    .algorithm
                    .response(challenge.identifier, &user.secret, &challenge.bytes);
                if aws_lc_rs::constant_time::verify_slices_are_equal(&expected, &response).is_err() {
                    return Err(ChapFailure::Refused);
                }
                if let (Some(identifier), Some(bytes)) = (value("CHAP_I"), value("CHAP_C")) {
                    let target = target.ok_or(ChapFailure::Refused)?;
                    challenge.prove(target, identifier, bytes, answer)?;
                }
                *self = Self::Done;
                Ok(Some(name.to_owned()))
            }
            Self::Done => Err(ChapFailure::Malformed),
        }
    }
}

impl Challenge {
    /// Answers the initiator's challenge.
    fn prove(
        &self,
        target: &ChapUser,
        identifier: &str,
        challenge: &str,
        answer: &mut Vec<u8>,
    ) -> Result<(), ChapFailure> {
        let identifier = text::number(identifier).and_then(|number| u8::try_from(number).ok());
        let identifier = identifier.ok_or(ChapFailure::Malformed)?;
        let bytes = text::binary(challenge, CHALLENGE_BYTES_MAX).ok_or(ChapFailure::Malformed)?;
        // The response to this challenge would prove the identity of the initiator to this target.
        if bytes == self.bytes {
            return Err(ChapFailure::Refused);
        }
        let response = self.algorithm.response(identifier, &target.secret, &bytes);
        text::push(answer, "CHAP_N", &target.name);
        text::push(answer, "CHAP_R", &text::to_hexadecimal(&response));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::text::{self, Pair};
    use super::{Algorithm, ChallengeSeed, ChapFailure, ChapSecret, ChapState, ChapUser};

    const SEED: ChallengeSeed = ChallengeSeed {
        identifier: 9,
        challenge: [3; 16],
    };

    fn user(name: &str, secret: &[u8]) -> ChapUser {
        ChapUser {
            name: name.to_owned(),
            secret: ChapSecret::new(secret).unwrap(),
        }
    }

    fn step(
        state: &mut ChapState,
        text: &str,
        target: Option<&ChapUser>,
    ) -> (Result<Option<String>, ChapFailure>, String) {
        let users = [user("mary", b"twelve bytes")];
        let pairs: Vec<Pair<'_>> = text
            .split(' ')
            .filter_map(|pair| pair.split_once('='))
            .map(|(key, value)| Pair { key, value })
            .collect();
        let mut answer = Vec::new();
        let done = state.step(&pairs, &users, target, SEED, &mut answer);
        (done, String::from_utf8(answer).unwrap().replace('\0', " "))
    }

    fn response(algorithm: Algorithm, identifier: u8, secret: &[u8], challenge: &[u8]) -> String {
        text::to_hexadecimal(&algorithm.response(identifier, &ChapSecret::new(secret).unwrap(), challenge))
    }

    #[test]
    fn the_response_is_that_of_rfc_1994() {
        // MD5 over the identifier, the secret and the challenge, by an independent program.
        let found = response(Algorithm::Md5, 1, b"twelve bytes", b"challenge");
        assert_eq!(found, "0x8dd13d8acde0418315dd80626e89e79a");
        assert_eq!(response(Algorithm::Sha256, 1, b"twelve bytes", b"challenge").len(), 66);
        assert_ne!(found, response(Algorithm::Md5, 2, b"twelve bytes", b"challenge"));
    }

    #[test]
    fn only_the_right_secret_is_accepted() {
        for (offer, algorithm) in [
            ("5", Algorithm::Md5),
            ("5,7", Algorithm::Sha256),
            ("6,5", Algorithm::Md5),
        ] {
            let right = response(algorithm, 9, b"twelve bytes", &[3; 16]);
            let wrong = response(algorithm, 9, b"other secret", &[3; 16]);
            for (name, response, expected) in [
                ("mary", &right, Ok(Some("mary".to_owned()))),
                ("mary", &wrong, Err(ChapFailure::Refused)),
                ("john", &right, Err(ChapFailure::Refused)),
            ] {
                let mut state = ChapState::Begin;
                let (begun, answer) = step(&mut state, &format!("CHAP_A={offer}"), None);
                assert_eq!(begun, Ok(None));
                assert!(answer.contains("CHAP_I=9") && answer.contains(&format!("CHAP_A={}", algorithm.number())));
                let (done, _) = step(&mut state, &format!("CHAP_N={name} CHAP_R={response}"), None);
                assert_eq!(done, expected, "{offer} {name}");
                assert_eq!(state == ChapState::Done, expected.is_ok());
            }
        }
    }

    #[test]
    fn the_target_proves_its_identity_but_never_to_its_own_challenge() {
        let target = user("target", b"another secret");
        let right = response(Algorithm::Md5, 9, b"twelve bytes", &[3; 16]);
        let theirs = text::to_hexadecimal(&[8; 20]);
        for (challenge, target, is_accepted) in [
            (theirs.as_str(), Some(&target), true),
            (theirs.as_str(), None, false),
            (&text::to_hexadecimal(&[3; 16]), Some(&target), false),
            ("0x", Some(&target), false),
        ] {
            let mut state = ChapState::Begin;
            step(&mut state, "CHAP_A=5", target).0.unwrap();
            let request = format!("CHAP_N=mary CHAP_R={right} CHAP_I=77 CHAP_C={challenge}");
            let (done, answer) = step(&mut state, &request, target);
            assert_eq!(done.is_ok(), is_accepted, "{challenge}");
            if is_accepted {
                let expected = response(Algorithm::Md5, 77, b"another secret", &[8; 20]);
                assert_eq!(answer, format!("CHAP_N=target CHAP_R={expected} "));
            }
        }
    }

    #[test]
    fn incomplete_requests_fail() {
        for first in ["CHAP_A=6", "CHAP_A=", "CHAP_N=mary", ""] {
            assert_eq!(step(&mut ChapState::Begin, first, None).0, Err(ChapFailure::Malformed));
        }
        for second in ["CHAP_N=mary", "CHAP_R=0x00", "CHAP_N=mary CHAP_R=zz"] {
            let mut state = ChapState::Begin;
            step(&mut state, "CHAP_A=5", None).0.unwrap();
            assert_eq!(step(&mut state, second, None).0, Err(ChapFailure::Malformed));
        }
        assert!(ChapSecret::new(b"short").is_none());
    }
}
