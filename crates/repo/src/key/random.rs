//! Where random bytes come from.

use super::{KeyError, Result};

/// A source of bytes that nobody can guess; a simulation passes one that a seed decides.
pub trait Randomness: Send + Sync {
    /// Fills `bytes`.
    fn fill(&self, bytes: &mut [u8]) -> Result<()>;
}

/// The operating system's randomness, by way of the crypto library.
#[derive(Debug, Clone, Copy, Default)]
pub struct SystemRandomness;

impl Randomness for SystemRandomness {
    fn fill(&self, bytes: &mut [u8]) -> Result<()> {
        aws_lc_rs::rand::fill(bytes).map_err(|_| KeyError::NoRandomness)
    }
}

/// An array of random bytes.
pub(super) fn random<const N: usize>(randomness: &dyn Randomness) -> Result<[u8; N]> {
    let mut bytes = [0; N];
    randomness.fill(&mut bytes)?;
    Ok(bytes)
}

/// Bytes that a seed decides.
#[cfg(test)]
pub(super) struct Counting(pub(super) std::sync::atomic::AtomicU64);

#[cfg(test)]
impl Counting {
    pub(super) fn new(seed: u64) -> Self {
        Self(seed.into())
    }
}

#[cfg(test)]
impl Randomness for Counting {
    fn fill(&self, bytes: &mut [u8]) -> Result<()> {
        let number = self.0.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let mut hasher = blake3::Hasher::new();
        hasher.update(&number.to_le_bytes());
        hasher.finalize_xof().fill(bytes);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_system_gives_other_bytes_each_time() {
        let [a, b]: [[u8; 32]; 2] = [(); 2].map(|()| random(&SystemRandomness).unwrap());
        assert_ne!(a, b);
        assert_ne!(a, [0; 32]);
    }
}
