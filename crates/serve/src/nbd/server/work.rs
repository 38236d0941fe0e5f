//! The class of a request, by which its time is measured.

use super::request::{Durability, Request, RequestCommand};
use crate::server::dispatch::{Work, WorkClass};

/// The work that a request is.
pub(crate) fn work_of(request: &Request) -> Work {
    let class = match request.command {
        RequestCommand::Flush => WorkClass::Durable,
        _ if request.durability == Durability::BeforeReply => WorkClass::Durable,
        RequestCommand::Read(_) => WorkClass::Read,
        RequestCommand::Write => WorkClass::Write,
        RequestCommand::Trim
        | RequestCommand::Cache
        | RequestCommand::WriteZeroes(_)
        | RequestCommand::BlockStatus { .. } => WorkClass::Other,
    };
    let bytes = match request.command {
        RequestCommand::Read(_) | RequestCommand::Write => request.length,
        _ => 0,
    };
    Work { class, bytes }
}

#[cfg(test)]
mod tests {
    use super::super::request::{Durability, Request, RequestCommand};
    use super::work_of;
    use crate::server::dispatch::{Work, WorkClass};

    #[test]
    fn durable_requests_are_measured_apart() {
        let work = |command, durability| {
            work_of(&Request {
                cookie: 0,
                offset: 0,
                length: 4096,
                command,
                durability,
            })
        };
        let expected = |class, bytes| Work { class, bytes };
        assert_eq!(
            work(RequestCommand::Write, Durability::Later),
            expected(WorkClass::Write, 4096)
        );
        assert_eq!(
            work(RequestCommand::Write, Durability::BeforeReply),
            expected(WorkClass::Durable, 4096)
        );
        assert_eq!(
            work(RequestCommand::Flush, Durability::Later),
            expected(WorkClass::Durable, 0)
        );
        assert_eq!(
            work(RequestCommand::Trim, Durability::Later),
            expected(WorkClass::Other, 0)
        );
    }
}
