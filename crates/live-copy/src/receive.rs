//! The receiver of a copy: carries out what the state machine asks for.

use std::io::{BufRead as _, BufReader, Read as _, Write};
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver as Inbox, RecvTimeoutError, Sender as Outbox, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use holdfast_block::{BlockDeviceMut, Clock, error_text, to_usize};
use holdfast_image::Continue;
use holdfast_repo::key::Randomness;
use holdfast_transfer::{
    Capabilities, Digest, ErrorCode, LinkId, Message, RangeContent, RangeDecompressor, Receiver, ReceiverAction,
    ReceiverEvent, ReceiverId, ReceiverOptions, ReceiverState,
};

use crate::error::{Error, Result};
use crate::frame_queue::FrameTreatment;
use crate::link::{Link, LinkCompression, LinkEvent, LinkOptions};
use crate::request::{Answer, REQUEST_BYTES_MAX, ReceiveRequest};
use crate::send_rate::SendRate;
use crate::stream::ByteStream;
use crate::target::{ExportTarget, Target, TargetHost};

/// Bytes of frames with data that may be under way: eight units, or a part of the disk. What is under way when a
/// connection breaks is sent again.
const WINDOW_BYTES: RangeInclusive<u64> = 8 << 20..=32 << 20;
const WINDOW_PARTS: u64 = 32;
/// Threads that write and read the target.
const THREAD_COUNT: usize = 4;
/// A sender sends something every second. After this time without a frame, it is gone.
const SILENCE_MAX: Duration = Duration::from_secs(30);
const LOOK_INTERVAL: Duration = Duration::from_millis(500);
/// The receiver of a process has one stream.
const LINK: LinkId = LinkId(0);

/// What a receiver needs of its host.
#[derive(Clone)]
pub struct ReceiveTools {
    /// The clock.
    pub clock: Arc<dyn Clock>,
    /// Randomness for the identity of the receiver.
    pub randomness: Arc<dyn Randomness>,
    /// The folder for journals of block devices and exports.
    pub journal_folder: PathBuf,
    /// Name and version of the program.
    pub program: String,
}

/// How a connection ended, at the receiver.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReceiveOutcome {
    /// The copy is complete, and has its name.
    Complete,
    /// The copy is not complete. Another connection continues it.
    Incomplete,
}

/// The targets that a receiver accepts.
#[derive(Clone, Copy)]
pub enum TargetScope<'a> {
    /// Files and block devices of this host.
    Host,
    /// Files of this folder.
    Folder(&'a Path),
    /// This export, whose address is the target of the request.
    Export(&'a ExportTarget),
}

/// Receives over one stream, which begins with a request.
///
/// # Errors
/// The request is refused, or the target cannot be written. The sender gets the reason of a refusal, too.
pub fn serve_receiver(stream: ByteStream, scope: TargetScope<'_>, tools: &ReceiveTools) -> Result<ReceiveOutcome> {
    let ByteStream {
        input,
        mut output,
        closer,
    } = stream;
    let mut input = BufReader::new(input);
    let mut line = Vec::new();
    let read = (&mut input).take(REQUEST_BYTES_MAX).read_until(b'\n', &mut line);
    let invalid = |reason: String| Error::Request { reason };
    read.map_err(|error| invalid(error.to_string()))?;
    let opened = serde_json::from_slice::<ReceiveRequest>(&line)
        .map_err(|error| invalid(error.to_string()))
        .and_then(|request| {
            if let TargetScope::Folder(folder) = scope {
                check_place(&request.target, folder)?;
                if let Some(seed) = &request.seed {
                    check_place(&seed.path, folder)?;
                }
            }
            let mut report = |progress| match send_answer(&mut output, &Answer::Seeding(progress)) {
                Ok(()) => Continue::Go,
                Err(_) => Continue::Stop,
            };
            let host = TargetHost {
                export: match scope {
                    TargetScope::Export(export) => Some(export),
                    TargetScope::Host | TargetScope::Folder(_) => None,
                },
                journal_folder: &tools.journal_folder,
                clock: &*tools.clock,
            };
            let opened = Target::open(&request, host, &mut report)?;
            Ok((request, opened))
        });
    let answer = match &opened {
        Ok(_) => Answer::Ready {},
        // Without an answer, the sender tries again: the server may come back.
        Err(Error::Export(_)) => return opened.map(|_| ReceiveOutcome::Incomplete),
        Err(error) => Answer::Refused {
            kind: error.refusal_kind(),
            reason: error_text(error),
        },
    };
    let answered = send_answer(&mut output, &answer);
    let (request, (target, state)) = opened?;
    answered.map_err(|error| invalid(error.to_string()))?;
    let receiver = Receiver::new(
        ReceiverOptions {
            receiver: ReceiverId(random_bytes(&*tools.randomness)?),
            capabilities: Capabilities::ALL,
            window_bytes: (request.size_bytes / WINDOW_PARTS).clamp(*WINDOW_BYTES.start(), *WINDOW_BYTES.end()),
            stream_count_max: 1,
            disk_bytes_max: request.size_bytes,
            prior: request.prior(),
            program: tools.program.clone(),
        },
        state,
    );
    let stream = ByteStream {
        input: Box::new(input),
        output,
        closer,
    };
    run(receiver, target, stream, &tools.clock)
}

fn send_answer(output: &mut dyn Write, answer: &Answer) -> std::io::Result<()> {
    let mut line = serde_json::to_vec(answer)?;
    line.push(b'\n');
    output.write_all(&line)?;
    output.flush()
}

/// Refuses a target outside of `folder`, also by way of links.
fn check_place(target: &Path, folder: &Path) -> Result<()> {
    let elsewhere = || Error::TargetElsewhere {
        path: target.to_owned(),
        folder: folder.to_owned(),
    };
    let parent = target.parent().and_then(|parent| parent.canonicalize().ok());
    let allowed = folder.canonicalize().map_err(|source| Error::File {
        action: "find",
        path: folder.to_owned(),
        source,
    })?;
    let is_link = target.symlink_metadata().is_ok_and(|found| found.is_symlink());
    match parent {
        Some(parent) if parent.starts_with(&allowed) && !is_link => Ok(()),
        _ => Err(elsewhere()),
    }
}

/// What the main thread waits for.
enum Arrival {
    Link(LinkEvent),
    Operation(ReceiverEvent),
}

fn run(mut receiver: Receiver, target: Target, stream: ByteStream, clock: &Arc<dyn Clock>) -> Result<ReceiveOutcome> {
    let (arrivals, inbox) = channel();
    let from_link = arrivals.clone();
    let deliver = move |event| from_link.send(Arrival::Link(event)).is_ok();
    let options = LinkOptions {
        clock: Arc::clone(clock),
        compression: LinkCompression::Off,
        rate: Arc::new(SendRate::unlimited(Arc::clone(clock))),
    };
    let link = Link::start(stream, options, deliver).map_err(|source| Error::Connection {
        place: "the sender".to_owned(),
        source,
    })?;
    let (operations, queue) = channel::<ReceiverAction>();
    let queue = Mutex::new(queue);
    let is_over = std::thread::scope(|scope| {
        for _ in 0..THREAD_COUNT {
            let (arrivals, queue, target) = (arrivals.clone(), &queue, &target);
            scope.spawn(move || work(queue, target, &arrivals));
        }
        let ended = drive(&mut receiver, &target, &link, &inbox, &operations, &**clock);
        if ended.is_err() {
            // The sender waits for the end of this receiver, and its source may be frozen.
            target.abandon_operations();
        }
        drop(operations);
        ended
    });
    link.close();
    let is_forgotten = is_over?;
    let outcome = if receiver.state() == ReceiverState::Owner {
        ReceiveOutcome::Complete
    } else {
        target.keep_received();
        ReceiveOutcome::Incomplete
    };
    if is_forgotten == Knowledge::Shared {
        target.forget()?;
    }
    Ok(outcome)
}

/// Whether the sender knows that the receiver is the owner.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Knowledge {
    Shared,
    Unsure,
}

fn drive(
    receiver: &mut Receiver,
    target: &Target,
    link: &Link,
    inbox: &Inbox<Arrival>,
    operations: &Outbox<ReceiverAction>,
    clock: &dyn Clock,
) -> Result<Knowledge> {
    let mut heard = clock.now();
    let mut knowledge = Knowledge::Unsure;
    loop {
        let arrival = match inbox.recv_timeout(LOOK_INTERVAL) {
            Ok(arrival) => arrival,
            Err(RecvTimeoutError::Timeout) if clock.now().saturating_sub(heard) < SILENCE_MAX => continue,
            Err(_) => return Ok(knowledge),
        };
        let event = match arrival {
            Arrival::Link(LinkEvent::Frame(frame)) => {
                heard = clock.now();
                ReceiverEvent::Received { link: LINK, frame }
            }
            Arrival::Link(LinkEvent::Written(_)) => continue,
            Arrival::Link(LinkEvent::Closed) => return Ok(knowledge),
            Arrival::Operation(event) => event,
        };
        let failure = match &event {
            ReceiverEvent::OperationFailed { detail, .. } => Some(detail.clone()),
            _ => None,
        };
        receiver.handle(event, clock.now());
        let mut is_closed = false;
        while let Some(action) = receiver.next_action() {
            match action {
                ReceiverAction::Send { frame, .. } => {
                    // The sender of a duplicate learns from this error that an earlier attempt was completed.
                    if matches!(&frame.message, Message::Error(error) if error.code == ErrorCode::AlreadyOwner) {
                        knowledge = Knowledge::Shared;
                    }
                    link.send(frame, FrameTreatment::AsItIs);
                }
                ReceiverAction::Close(_) => is_closed = true,
                ReceiverAction::BecameOwner { .. } => target.finish()?,
                ReceiverAction::EndKnown => knowledge = Knowledge::Shared,
                operation => {
                    operations.send(operation).ok();
                }
            }
        }
        if let Some(reason) = failure {
            return Err(Error::Target { reason });
        }
        if is_closed {
            return Ok(knowledge);
        }
    }
}

/// Carries out operations until there are none left.
fn work(queue: &Mutex<Inbox<ReceiverAction>>, target: &Target, arrivals: &Outbox<Arrival>) {
    let mut decompressor = RangeDecompressor::default();
    loop {
        let next = queue.lock().unwrap_or_else(PoisonError::into_inner).recv();
        let Ok(action) = next else { return };
        let event =
            carry_out(action, target, &mut decompressor).unwrap_or_else(|error| ReceiverEvent::OperationFailed {
                failure: error.storage_failure(),
                detail: error_text(&error),
            });
        if arrivals.send(Arrival::Operation(event)).is_err() {
            return;
        }
    }
}

fn carry_out(action: ReceiverAction, target: &Target, decompressor: &mut RangeDecompressor) -> Result<ReceiverEvent> {
    let device: &dyn BlockDeviceMut = target.device();
    match action {
        ReceiverAction::Write {
            operation,
            range,
            content,
        } => {
            match content {
                RangeContent::Data(bytes) => device.write_at(&bytes, range.start)?,
                RangeContent::Zero | RangeContent::Hole => device.write_zeroes(range)?,
            }
            Ok(ReceiverEvent::Completed(operation))
        }
        ReceiverAction::Flush { operation } => {
            device.flush()?;
            Ok(ReceiverEvent::Completed(operation))
        }
        ReceiverAction::AppendJournal { operation, bytes } => {
            target.append(&bytes)?;
            Ok(ReceiverEvent::Completed(operation))
        }
        ReceiverAction::HashUnit { operation, range } => {
            let mut bytes = vec![0; to_usize(range.end - range.start)];
            device.read_at(&mut bytes, range.start)?;
            let digest = Digest::of(&bytes);
            Ok(ReceiverEvent::UnitHashed { operation, digest })
        }
        ReceiverAction::Decompress { operation, frame } => Ok(ReceiverEvent::Decompressed {
            operation,
            data: decompressor.decompress(&frame),
        }),
        ReceiverAction::ExamineIdentity { operation } => Ok(ReceiverEvent::IdentityExamined {
            operation,
            identity: target.examine(),
        }),
        ReceiverAction::Send { .. }
        | ReceiverAction::Close(_)
        | ReceiverAction::BecameOwner { .. }
        | ReceiverAction::EndKnown => unreachable!("the main thread handles it"),
    }
}

/// The random identity of a receiver.
fn random_bytes(randomness: &dyn Randomness) -> Result<[u8; 16]> {
    let mut bytes = [0; 16];
    randomness
        .fill(&mut bytes)
        .map_err(|source| Error::Engine(source.into()))?;
    Ok(bytes)
}
