//! Compresses and decompresses clusters.
//!
//! Type 0 is a raw deflate stream without a header. QEMU writes and reads it with a window of 4 KiB (`windowBits`
//! -12), so streams for other programs must not refer further back. libdeflate, the fastest decoder, has no such limit
//! when it compresses: therefore it only decompresses here, and zlib-rs compresses. Type 1 is a zstd frame. Arbitrary
//! bytes may follow both in the last sector.

use std::sync::{Mutex, PoisonError};

use flate2::{Compress, Decompress, FlushCompress, FlushDecompress, Status};
use zstd::stream::raw::{DParameter, Decoder as ZstdDecoder, InBuffer, Operation as _, OutBuffer};

use crate::Compression;

/// log2 of the window of deflate streams.
const DEFLATE_WINDOW_BITS: u8 = 12;
/// log2 of the largest window of zstd frames: eight times the largest cluster. It bounds the memory of a decoder.
const ZSTD_WINDOW_BITS_MAX: u32 = 24;
/// A third of the time of zlib's own level 6, for one percent of space.
const ZLIB_LEVEL_DEFAULT: u32 = 4;
const ZSTD_LEVEL_DEFAULT: i32 = 3;

/// Decompresses clusters of one kind; can be used by several threads.
pub(crate) struct Decoder {
    compression: Compression,
    idle: Mutex<Vec<IdleDecoder>>,
}

enum IdleDecoder {
    Zlib(libdeflater::Decompressor),
    Zstd(ZstdDecoder<'static>),
}

/// Decoders that are kept for later reads; further threads create new ones each time.
const IDLE_COUNT_MAX: usize = 16;

impl Decoder {
    pub(crate) fn new(compression: Compression) -> Self {
        Self {
            compression,
            idle: Mutex::default(),
        }
    }

    /// Decompresses into `cluster`; `input` may have bytes after the compressed data.
    pub(crate) fn decompress(&self, input: &[u8], cluster: &mut [u8]) -> Result<(), String> {
        let taken = self.idle.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let mut state = match taken {
            Some(state) => state,
            None => IdleDecoder::new(self.compression)?,
        };
        let result = state.decompress(input, cluster);
        if result.is_ok() {
            let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
            if idle.len() < IDLE_COUNT_MAX {
                idle.push(state);
            }
        }
        result
    }
}

impl IdleDecoder {
    fn new(compression: Compression) -> Result<Self, String> {
        Ok(match compression {
            Compression::Zlib => Self::Zlib(libdeflater::Decompressor::new()),
            Compression::Zstd => {
                let mut decoder = ZstdDecoder::new().map_err(|error| error.to_string())?;
                decoder
                    .set_parameter(DParameter::WindowLogMax(ZSTD_WINDOW_BITS_MAX))
                    .map_err(|error| error.to_string())?;
                Self::Zstd(decoder)
            }
        })
    }

    fn decompress(&mut self, input: &[u8], cluster: &mut [u8]) -> Result<(), String> {
        match self {
            Self::Zlib(decoder) => match decoder.deflate_decompress(input, cluster) {
                Ok(count) if count == cluster.len() => Ok(()),
                Ok(count) => Err(format!(
                    "deflate stream of {count} bytes for a cluster of {}",
                    cluster.len()
                )),
                // QEMU accepts a stream that lacks its end marker, or is longer than the cluster.
                Err(_) => inflate(input, cluster),
            },
            Self::Zstd(decoder) => unzstd(decoder, input, cluster),
        }
    }
}

fn inflate(input: &[u8], cluster: &mut [u8]) -> Result<(), String> {
    let mut decoder = Decompress::new(false);
    match decoder.decompress(input, cluster, FlushDecompress::Finish) {
        Ok(_) if decoder.total_out() == cluster.len() as u64 => Ok(()),
        Ok(_) => Err(format!("deflate stream ends after {} bytes", decoder.total_out())),
        Err(error) => Err(format!("deflate stream: {error}")),
    }
}

fn unzstd(decoder: &mut ZstdDecoder<'static>, input: &[u8], cluster: &mut [u8]) -> Result<(), String> {
    decoder.reinit().map_err(|error| error.to_string())?;
    let length = cluster.len();
    let mut input = InBuffer::around(input);
    let mut output = OutBuffer::around(cluster);
    while output.pos() < length {
        let before = (input.pos(), output.pos());
        decoder
            .run(&mut input, &mut output)
            .map_err(|error| format!("zstd frame: {error}"))?;
        if (input.pos(), output.pos()) == before {
            return Err(format!("zstd frame ends after {} bytes", output.pos()));
        }
    }
    Ok(())
}

/// Compresses clusters, one after another; use one for each thread.
///
/// Compression is the slow part of writing a compressed image, and clusters are independent: any number of threads
/// compress, and one [`BulkWriter`](crate::BulkWriter) appends the results in order.
pub struct ClusterCompressor {
    state: CompressorState,
    /// Buffer for the result, which is reused.
    output: Vec<u8>,
}

enum CompressorState {
    Zlib(Box<Compress>),
    Zstd(Box<zstd::bulk::Compressor<'static>>),
}

impl ClusterCompressor {
    /// QEMU stores the machine state of a snapshot past the end of the disk, and leaves it in the active
    /// state after reverting to the snapshot. Then it belongs to the snapshot, and is not wasted.
    pub fn new(compression: Compression, level: Option<u32>) -> crate::Result<Self> {
        let invalid = |detail: String| crate::Error::InvalidOption {
            option: "compression level",
            detail,
        };
        let state = match compression {
            Compression::Zlib => {
                let level = level.unwrap_or(ZLIB_LEVEL_DEFAULT);
                if !(1..=9).contains(&level) {
                    return Err(invalid(format!("{level} is not between 1 and 9")));
                }
                let level = flate2::Compression::new(level);
                CompressorState::Zlib(Box::new(Compress::new_with_window_bits(
                    level,
                    false,
                    DEFLATE_WINDOW_BITS,
                )))
            }
            Compression::Zstd => {
                let level = level.map_or(ZSTD_LEVEL_DEFAULT, |level| i32::try_from(level).unwrap_or(i32::MAX));
                if !(1..=19).contains(&level) {
                    return Err(invalid(format!("{level} is not between 1 and 19")));
                }
                let compressor = zstd::bulk::Compressor::new(level).map_err(|error| invalid(error.to_string()))?;
                CompressorState::Zstd(Box::new(compressor))
            }
        };
        Ok(Self {
            state,
            output: Vec::new(),
        })
    }

    /// Compresses a whole cluster; [`None`] if that does not make it smaller, so that it is better stored
    /// uncompressed.
    pub fn compress(&mut self, cluster: &[u8]) -> Option<Vec<u8>> {
        // The buffer is large enough for any result: an aborted deflate stream leaves state behind that a reset does
        // not clear.
        let output = &mut self.output;
        output.resize(cluster.len() + cluster.len() / 8 + cluster.len() / 64 + 64, 0);
        let count = match &mut self.state {
            CompressorState::Zlib(compress) => {
                compress.reset();
                match compress.compress(cluster, output, FlushCompress::Finish) {
                    Ok(Status::StreamEnd) => usize::try_from(compress.total_out()).ok()?,
                    _ => return None,
                }
            }
            CompressorState::Zstd(compressor) => compressor.compress_to_buffer(cluster, output.as_mut_slice()).ok()?,
        };
        // A compressed cluster that is not smaller saves nothing, and does not fit into an entry.
        (count < cluster.len()).then(|| output[..count].to_vec())
    }
}

#[cfg(test)]
mod tests {
    use super::{ClusterCompressor, Decoder};
    use crate::model::qcow2_info::Compression;

    /// Text with distant repetitions, for which an unlimited window would be used.
    fn sample(length: usize) -> Vec<u8> {
        let mut state = 1u32;
        let block: Vec<u8> = std::iter::repeat_with(|| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            state.to_be_bytes()[0] & 0x3f
        })
        .take(9000)
        .collect();
        block.iter().copied().cycle().take(length).collect()
    }

    #[test]
    fn clusters_decompress_with_trailing_garbage() {
        for compression in [Compression::Zlib, Compression::Zstd] {
            let mut compressor = ClusterCompressor::new(compression, None).unwrap();
            let decoder = Decoder::new(compression);
            for length in [512, 4096, 65_536, 2 << 20] {
                let cluster = sample(length);
                let mut packed = compressor.compress(&cluster).expect("it shrinks");
                packed.extend([0xff; 300]);
                let mut found = vec![0; length];
                decoder.decompress(&packed, &mut found).unwrap();
                assert!(found == cluster, "{compression:?} {length}");
            }
        }
    }

    #[test]
    fn incompressible_is_none_and_damage_is_reported() {
        let mut state = 1u64;
        let noise: Vec<u8> = std::iter::repeat_with(|| {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            state.to_be_bytes()[0]
        })
        .take(65_536)
        .collect();
        for compression in [Compression::Zlib, Compression::Zstd] {
            let mut compressor = ClusterCompressor::new(compression, None).unwrap();
            for _ in 0..20 {
                assert_eq!(compressor.compress(&noise), None);
            }
            let mut found = vec![0; 65_536];
            assert!(Decoder::new(compression).decompress(&noise, &mut found).is_err());
            let short = compressor.compress(&[7; 512]).unwrap();
            assert!(Decoder::new(compression).decompress(&short, &mut found).is_err());
        }
    }

    /// Decodes the stream with a window of 4 KiB: no match may refer further back, or decoders that rely on QEMU's
    /// limit fail. zlib-rs with a window of 12 bits must respect that.
    #[test]
    fn deflate_streams_respect_qemu_window() {
        let cluster = sample(65_536);
        let packed = ClusterCompressor::new(Compression::Zlib, Some(9))
            .unwrap()
            .compress(&cluster)
            .unwrap();
        assert!(
            packed.len() > 20_000,
            "the repeat after 9000 bytes is out of reach: {}",
            packed.len()
        );
        let mut decoder = flate2::Decompress::new_with_window_bits(false, 12);
        let mut found: Vec<u8> = Vec::new();
        let mut input = &packed[..];
        // A small output buffer, so that earlier output is only in the decoder's own window.
        while found.len() < cluster.len() {
            let mut piece = [0; 256];
            let before = (decoder.total_in(), decoder.total_out());
            decoder
                .decompress(input, &mut piece, flate2::FlushDecompress::None)
                .unwrap();
            input = &input[usize::try_from(decoder.total_in() - before.0).unwrap()..];
            found.extend(&piece[..usize::try_from(decoder.total_out() - before.1).unwrap()]);
        }
        assert!(found == cluster);
    }
}
