//! `holdfast notify`: sends a test message to a recipient of a holdfast.toml.

use holdfast_daemon::{Message, Notice, deliver};
use holdfast_policy::config::{Channel, Event};
use serde::Serialize;

use crate::args::{Example, SharedOptions};
use crate::commands::verb::Verb;
use crate::context::Context;
use crate::context::holdfast_file::HoldfastFileArgs;
use crate::errors::{Error, Kind};
use crate::exit::Exit;
use crate::output::{Page, Report, Style};
use crate::process::environment;
use crate::process::time;

/// Arguments of `notify`.
#[derive(Debug, clap::Args)]
pub(crate) struct NotifyArgs {
    /// Whom to send a test message: the NAME of a section [notify.NAME]
    #[arg(value_name = "NAME")]
    name: String,
    #[command(flatten)]
    file: HoldfastFileArgs,
}

impl Verb for NotifyArgs {
    const EXAMPLES: &'static [Example] = &[Example {
        wish: "See whether a message arrives before one is needed",
        line: "holdfast notify admin",
    }];
    const UNUSED: &'static [SharedOptions] = &[SharedOptions::Repository, SharedOptions::Progress];

    fn run(&self, context: &Context) -> Result<Exit, Error> {
        run(self, context)
    }
}

/// Report of `notify`.
#[derive(Debug, Serialize)]
struct Sent {
    name: String,
    by: &'static str,
    /// Why it could not be delivered; null if it was.
    error: Option<String>,
}

impl Report for Sent {
    fn command(&self) -> &'static str {
        "notify"
    }

    fn is_confirmation(&self) -> bool {
        true
    }

    fn exit(&self) -> Exit {
        if self.error.is_some() { Exit::Error } else { Exit::Ok }
    }

    fn human(&self, page: &mut Page) {
        match &self.error {
            Some(error) => page.styled(Style::Bad, &format!("{} could not be notified: {error}", self.name)),
            None => page.line(&format!(
                "a test message was handed over for {}, by {}",
                self.name, self.by
            )),
        }
    }
}

fn run(args: &NotifyArgs, context: &Context) -> Result<Exit, Error> {
    let config = args.file.load(context)?;
    let Some(notify) = config.recipients.iter().find(|notify| notify.name == args.name) else {
        return Err(Error::refused(
            Kind::NotFound,
            format!(
                "there is no [notify.{}] in {}",
                args.name,
                args.file.path(context).display()
            ),
            "holdfast config check shows whether it is written as it should be",
        ));
    };
    let notice = Notice {
        event: Event::Failure,
        job: "none".to_owned(),
        machine: None,
        is_good: true,
        subject: "this is a test".to_owned(),
        text: "Messages of holdfast arrive.".to_owned(),
        run: None,
    };
    let message = Message::new(&notice, &crate::process::kernel::host_name(), &time::now().to_string());
    let withheld = [environment::PASSWORD.to_owned()];
    let answer = deliver(&notify.channel, &message, &withheld, &**context.clock());
    context.report(&Sent {
        name: args.name.clone(),
        by: match notify.channel {
            Channel::Mail { .. } => "mail",
            Channel::Webhook { .. } => "webhook",
            Channel::Ntfy { .. } => "ntfy",
        },
        error: answer.err(),
    })
}
