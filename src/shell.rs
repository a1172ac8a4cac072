//! `selkie completions` and `selkie man`: files for shells and `man`, made from the definition of the command line.

use std::io::Write;

use clap::{Command, CommandFactory};
use clap_mangen::Man;

use crate::{
    args::{Cli, CompletionsArgs, ManArgs},
    failure::{Failure, Outcome},
    output_file::OutputFile,
    terminal::{self, Output},
};

/// Prints the completions of a shell.
pub fn completions(args: &CompletionsArgs) -> Outcome {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), "selkie", &mut script);
    Output::new().text(&String::from_utf8_lossy(&script))
}

/// Prints one page, or writes all of them.
pub fn man(args: &ManArgs) -> Outcome {
    let mut cli = Cli::command().disable_help_subcommand(true);
    // Names the subcommands in full: `selkie batch`.
    cli.build();
    if let Some(dir) = &args.dir {
        let pages: Vec<Command> = std::iter::once(cli.clone()).chain(cli.get_subcommands().cloned()).collect();
        for page in &pages {
            let man = man_page(page);
            let mut file = OutputFile::create(&dir.join(man.get_filename()))?;
            man.render(&mut file).and_then(|()| file.flush()).map_err(|e| file.error(e))?;
            file.commit()?;
        }
        terminal::dim_note(format_args!("{} pages are in {}", pages.len(), dir.display()));
        return Ok(());
    }
    let page = match &args.command {
        None => &cli,
        Some(name) => cli
            .find_subcommand(name)
            .ok_or_else(|| Failure::Usage(format!("there is no command `{name}`; `selkie --help` lists them")))?,
    };
    let mut text = Vec::new();
    man_page(page).render(&mut text).map_err(Failure::output)?;
    Output::new().text(&String::from_utf8_lossy(&text))
}

fn man_page(command: &Command) -> Man {
    Man::new(command.clone()).source(format!("selkie {}", env!("CARGO_PKG_VERSION")))
}
