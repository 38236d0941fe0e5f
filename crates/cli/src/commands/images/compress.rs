//! `holdfast compress`: compresses a stream on all cores and appends an index.

use std::fs::File;
use std::io::{Read, Write};
use std::num::NonZero;
use std::path::PathBuf;

use holdfast_archive::{Error as ArchiveError, PackOptions, Packed, Packing, Unpacked, pack};
use holdfast_block::Threads;
use holdfast_engine::{Job, MAY_BE_CUT, Unit};

use crate::args::{Example, JobArgs, SharedOptions};
use crate::commands::verb::Verb;
use crate::context::Context;
use crate::context::standard_streams::{PatientInput, StandardOutput, refuse_terminal, standard_input, stopped_or};
use crate::errors::Error;
use crate::exit::Exit;
use crate::units;

/// Arguments of `compress`.
#[derive(Debug, clap::Args)]
pub(crate) struct CompressArgs {
    /// The file to read, or `-` for standard input [default: -]
    #[arg(value_name = "FILE")]
    source: Option<PathBuf>,
    #[command(flatten)]
    packing: PackingArgs,
    /// Decompress; the format is detected
    #[arg(short, long, conflicts_with_all = ["gzip", "zstd", "level"])]
    decompress: bool,
    /// Use one thread while the load average is above this
    #[arg(long, value_name = "LOAD", value_parser = parse_load)]
    max_load: Option<f64>,
    #[command(flatten)]
    job: JobArgs,
}

/// How archives are packed.
#[derive(Debug, clap::Args)]
pub(crate) struct PackingArgs {
    /// Compress with gzip, which all programs can read
    #[arg(long, conflicts_with = "zstd")]
    gzip: bool,
    /// Compress with zstd, which is faster and smaller
    #[arg(long)]
    zstd: bool,
    /// Compression level: 1 to 12 for gzip, 1 to 19 for zstd
    #[arg(short, long, value_name = "LEVEL")]
    level: Option<i32>,
}

impl PackingArgs {
    /// The requested format, if any.
    pub(crate) fn packing(&self) -> Option<Packing> {
        match (self.gzip, self.zstd) {
            (true, _) => Some(Packing::Gzip),
            (_, true) => Some(Packing::Zstd),
            _ => None,
        }
    }

    /// The compression level.
    pub(crate) fn level(&self) -> Option<i32> {
        self.level
    }
}

impl Verb for CompressArgs {
    const EXAMPLES: &'static [Example] = &[
        Example {
            wish: "Export a machine of XenServer on all cores",
            line: "xe vm-export vm=web1 filename= | holdfast compress --zstd > web1.xva.zst",
        },
        Example {
            wish: "Replace pigz, leave one core free, and slow down on a busy host",
            line: "tar c /srv | holdfast compress --gzip --threads 3 --max-load 4 > srv.tar.gz",
        },
        Example {
            wish: "Unpack it",
            line: "holdfast compress --decompress web1.xva.zst > web1.xva",
        },
    ];
    const UNUSED: &'static [SharedOptions] = &[SharedOptions::Repository, SharedOptions::Json];

    fn run(&self, context: &Context) -> Result<Exit, Error> {
        run(self, context)
    }
}

fn parse_load(text: &str) -> Result<f64, String> {
    let load = text.parse().ok().filter(|load: &f64| load.is_finite() && *load > 0.0);
    load.ok_or_else(|| "a load is a number above 0, as 4 or 1.5".to_owned())
}

fn run(args: &CompressArgs, context: &Context) -> Result<Exit, Error> {
    context.output().refuse_json("compress")?;
    refuse_terminal()?;
    let threads = threads(args.job.thread_count(), args.max_load);
    let input = input(args.source.as_deref(), context)?;
    let output = StandardOutput::open(context)?;
    if args.decompress {
        context.work(args.job.thread_count(), |job| {
            stopped_or(unpack(input, output, threads, job), job)
        })?;
        return Ok(Exit::Ok.with_warning_count(context.console().warnings().len()));
    }
    let options = PackOptions {
        packing: args.packing.packing().unwrap_or(Packing::Zstd),
        level: args.packing.level(),
        threads,
    };
    let start = context.clock().now();
    let packed = context.work(args.job.thread_count(), |job| {
        job.progress.phase("packing", Unit::Bytes);
        let mut reported = 0;
        let packed = pack(input, Box::new(output), options, &mut |read| {
            step(job, &mut reported, read)
        });
        job.interrupt.check()?;
        Ok(packed?)
    })?;
    let duration = context.clock().now().saturating_sub(start);
    context.console().note(&summary(packed, duration));
    Ok(Exit::Ok)
}

/// The number of threads; all but one of them may have to wait while the load is high.
pub(crate) fn threads(count: usize, load_max: Option<f64>) -> Threads {
    Threads {
        count: NonZero::new(count).unwrap_or(NonZero::<usize>::MIN),
        load_max,
    }
}

/// A file or standard input. An interrupt ends a read that blocks.
pub(crate) fn input(path: Option<&std::path::Path>, context: &Context) -> Result<Box<dyn Read + Send>, Error> {
    let interrupt = context.interrupt()?;
    let input = if let Some(path) = path.filter(|path| path.as_os_str() != "-") {
        let opened = File::open(path).and_then(|file| PatientInput::of_file(file, interrupt));
        opened.map_err(|source| holdfast_engine::Error::File {
            action: "open",
            path: path.to_owned(),
            source,
        })?
    } else {
        PatientInput::new(standard_input()?, interrupt)
    };
    Ok(Box::new(input))
}

fn step(job: Job<'_>, reported: &mut u64, done: u64) -> std::io::Result<()> {
    job.progress.advance(done - *reported);
    *reported = done;
    job.interrupt.check().map_err(std::io::Error::other)
}

fn unpack(
    input: Box<dyn Read + Send>,
    mut output: StandardOutput,
    threads: Threads,
    job: Job<'_>,
) -> holdfast_engine::Result<()> {
    let read_error = |offset| move |source| holdfast_archive::Error::Read { offset, source };
    let mut stream = Unpacked::new(input, threads).map_err(read_error(0))?;
    job.progress.phase("unpacking", Unit::Bytes);
    let mut buffer = vec![0; 1 << 20];
    let mut done = 0;
    loop {
        let count = stream.read(&mut buffer).map_err(read_error(done))?;
        if done == 0 && stream.packing() == Packing::None {
            return Err(not_packed(&buffer[..count]).into());
        }
        if count == 0 {
            if stream.may_be_cut() {
                job.progress.warning(MAY_BE_CUT);
            }
            return output.flush().map_err(holdfast_engine::Error::Stdout);
        }
        output
            .write_all(&buffer[..count])
            .map_err(holdfast_engine::Error::Stdout)?;
        done += count as u64;
        job.progress.advance(count as u64);
        job.interrupt.check()?;
    }
}

/// The error for input that is not compressed. It is not copied as it is: the sender may have failed at the first
/// bytes.
fn not_packed(start: &[u8]) -> ArchiveError {
    let is_cut = |magic: &[u8]| magic.starts_with(start);
    if is_cut(&[0x1f, 0x8b]) || is_cut(&[0x28, 0xb5, 0x2f, 0xfd]) || is_cut(b"\xfd7zX") {
        return ArchiveError::CutOff {
            what: "the packed stream",
            offset: 0,
        };
    }
    ArchiveError::Corrupt {
        what: "packed stream",
        offset: 0,
        detail: "it is not compressed with gzip, zstd or xz".to_owned(),
    }
}

/// The size and speed of the compression.
fn summary(packed: Packed, duration: std::time::Duration) -> String {
    let mut parts = vec![
        format!("{} packed", units::bytes(packed.unpacked_bytes)),
        format!(
            "{} written ({})",
            units::bytes(packed.written_bytes),
            units::percent(packed.written_bytes, packed.unpacked_bytes)
        ),
        units::duration(duration),
    ];
    parts.extend(units::rate(packed.unpacked_bytes, duration).map(units::bytes_per_second));
    parts.join(", ")
}
