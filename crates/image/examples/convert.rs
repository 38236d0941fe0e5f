//! Converts an image: `convert SOURCE TARGET raw|qcow2|zlib|zstd [THREADS] [LEVEL]`. For comparison with `qemu-img convert`.

use std::num::NonZero;
use std::path::Path;

use holdfast_block::BlockDevice as _;
use holdfast_image::{
    Compression, Continue, CreateOptions, FillOptions, Format, OpenOptions, Qcow2Options, Result, Storage,
    TargetContent, create, create_bulk, fill, fill_device, open, open_mut,
};

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [source, target, kind, rest @ ..] = &arguments[..] else {
        panic!("usage: convert SOURCE TARGET raw|qcow2|zlib|zstd [THREADS] [LEVEL]");
    };
    let number = |index: usize| {
        rest.get(index)
            .map(|text: &String| text.parse::<u32>().expect("a number"))
    };
    let threads = NonZero::new(number(0).unwrap_or(2) as usize).expect("at least one thread");
    let source = open(Path::new(source), &OpenOptions::default())?;
    let target = Path::new(target);
    let size_bytes = source.size_bytes();
    if kind == "raw" {
        create(target, &CreateOptions::raw(size_bytes))?;
        let options = OpenOptions {
            format: Some(Format::Raw),
            ..OpenOptions::default()
        };
        fill_device(
            &source,
            &open_mut(target, &options)?,
            TargetContent::Zeroes,
            threads,
            &mut |_| Continue::Go,
        )?;
        return Ok(());
    }
    let (storage, compression) = match kind.as_str() {
        "zlib" => (Storage::Compressed { level: number(1) }, Compression::Zlib),
        "zstd" => (Storage::Compressed { level: number(1) }, Compression::Zstd),
        _ => (Storage::Plain, Compression::Zlib),
    };
    let qcow2 = Qcow2Options {
        compression,
        ..Qcow2Options::default()
    };
    let mut writer = create_bulk(
        target,
        &CreateOptions {
            qcow2,
            ..CreateOptions::qcow2(size_bytes)
        },
    )?;
    fill(&source, &mut writer, &FillOptions { threads, storage }, &mut |_| {
        Continue::Go
    })?;
    writer.finish()
}
