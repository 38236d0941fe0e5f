//! Sources of random bytes.

use rustix::io::Errno;
use rustix::rand::{GetRandomFlags, getrandom};

use super::{KeyError, Result};

/// A source of unpredictable bytes; a simulation passes a seeded one.
pub trait Randomness: Send + Sync {
    /// Fills `bytes`.
    fn fill(&self, bytes: &mut [u8]) -> Result<()>;
}

/// The operating system's randomness, directly from the kernel: a crypto library would first collect its own entropy,
/// which takes longer than many jobs.
#[derive(Debug, Clone, Copy, Default)]
pub struct SystemRandomness;

impl Randomness for SystemRandomness {
    fn fill(&self, bytes: &mut [u8]) -> Result<()> {
        let mut filled = 0;
        while filled < bytes.len() {
            // Blocks shortly after boot, until the kernel has collected enough entropy.
            match getrandom(&mut bytes[filled..], GetRandomFlags::empty()) {
                Ok(length) => filled += length,
                Err(Errno::INTR) => {}
                Err(_) => return Err(KeyError::NoRandomness),
            }
        }
        Ok(())
    }
}

/// An array of random bytes.
pub(super) fn random<const N: usize>(randomness: &dyn Randomness) -> Result<[u8; N]> {
    let mut bytes = [0; N];
    randomness.fill(&mut bytes)?;
    Ok(bytes)
}

/// Bytes determined by a seed.
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
        let mut long = vec![0; 100_000];
        SystemRandomness.fill(&mut long).unwrap();
        assert!(long.chunks(1000).all(|piece| piece.iter().any(|byte| *byte != 0)));
    }
}
