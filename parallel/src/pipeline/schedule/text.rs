//! Schedules as text: a line for each rank, its actions in order, `2F3` being stage 2's forward pass of micro-batch 3.
//!
//! ```text
//! 0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1
//! 1RECV_F0 1F0 1B0 1RECV_F1 1SEND_B0 1F1 1B1 1SEND_B1
//! ```

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

use super::{Action, Error, Kind, Result, Schedule};

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Kind::Forward => "F",
            Kind::Backward => "B",
            Kind::Input => "I",
            Kind::Weight => "W",
            Kind::Update => "U",
            Kind::SendForward => "SEND_F",
            Kind::RecvForward => "RECV_F",
            Kind::SendBackward => "SEND_B",
            Kind::RecvBackward => "RECV_B",
        })
    }
}

impl fmt::Display for Action {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}{}", self.stage, self.kind, self.micro_batch)
    }
}

impl fmt::Display for Schedule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for actions in &self.ranks {
            let tokens: Vec<String> = actions.iter().map(Action::to_string).collect();
            writeln!(f, "{}", tokens.join(" "))?;
        }
        Ok(())
    }
}

impl FromStr for Schedule {
    type Err = Error;

    /// Reads what `to_string` writes. Actions are separated by blanks or commas; a stage is placed where its actions are.
    fn from_str(text: &str) -> Result<Schedule> {
        let mut ranks = Vec::new();
        let mut placed = BTreeMap::new();
        let mut micro_batches = 0;
        for (rank, line) in text.lines().enumerate() {
            let wrong = |token: &str, wanted| Error::Parse { line: rank + 1, token: token.into(), wanted };
            let mut actions = Vec::new();
            for token in line.split([' ', '\t', ',']).filter(|token| !token.is_empty()) {
                let action = action(token).map_err(|wanted| wrong(token, wanted))?;
                if *placed.entry(action.stage).or_insert(rank) != rank {
                    return Err(wrong(token, "a stage that no line before has"));
                }
                micro_batches = micro_batches.max(action.micro_batch + 1);
                actions.push(action);
            }
            ranks.push(actions);
        }
        match placed.keys().enumerate().find(|&(i, &stage)| i != stage) {
            Some((gap, _)) => Err(Error::Invalid {
                op: "schedule",
                got: format!("no action of stage {gap}"),
                wanted: "every stage up to the last",
            }),
            None => Ok(Schedule { placement: placed.into_values().collect(), micro_batches, ranks }),
        }
    }
}

/// Reads one token; what was wanted if it is none.
fn action(token: &str) -> Result<Action, &'static str> {
    const KINDS: &str = "F, B, I, W, U, SEND_F, RECV_F, SEND_B or RECV_B after the stage";
    let (stage, rest) = number(token).ok_or("an action such as 2F3, beginning with a stage's number")?;
    let symbol = rest.trim_end_matches(|c: char| c.is_ascii_digit());
    let kind = Kind::ALL.into_iter().find(|kind| kind.to_string() == symbol).ok_or(KINDS)?;
    match number(&rest[symbol.len()..]) {
        Some((micro_batch, "")) => Ok(Action::new(stage, kind, micro_batch)),
        _ => Err("a micro-batch's number at the end"),
    }
}

/// The number at the beginning, and what follows it.
fn number(text: &str) -> Option<(usize, &str)> {
    let end = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    Some((usize::from(text[..end].parse::<u16>().ok()?), &text[end..]))
}
