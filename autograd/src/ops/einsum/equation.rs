//! What an einsum equation says: a label for each dimension of the operands and of the result.

use std::collections::BTreeMap;

/// The name of a dimension: a letter, or the i-th dimension of the ellipsis counted from its last. Letters come in
/// the order of ASCII, after the ellipsis.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Label {
    Ellipsis(usize),
    Letter(char),
}

impl std::fmt::Display for Label {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Label::Ellipsis(i) => write!(f, "...[-{}]", i + 1),
            Label::Letter(c) => write!(f, "{c}"),
        }
    }
}

/// The labels of each operand's dimensions, and of the result's.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Equation {
    pub(super) operands: Vec<Vec<Label>>,
    pub(super) output: Vec<Label>,
}

impl Equation {
    /// Reads `text` for operands of these ranks; the error says what is wrong.
    pub(super) fn parse(text: &str, ranks: &[usize]) -> Result<Equation, String> {
        let text: String = text.chars().filter(|c| !c.is_whitespace()).collect();
        let (inputs, output) = match text.split_once("->") {
            Some((inputs, output)) => (inputs, Some(output)),
            None => (text.as_str(), None),
        };
        let terms: Vec<&str> = inputs.split(',').collect();
        if terms.len() != ranks.len() {
            return Err(format!("it names {} operands, and {} came", terms.len(), ranks.len()));
        }
        let operand = |(term, &rank): (&&str, &usize)| {
            let (letters, _) = split(term)?;
            let labels = labels(term, rank.checked_sub(letters))?;
            let fits = labels.len() == rank;
            fits.then_some(labels).ok_or_else(|| format!("\"{term}\" does not name {rank} dimensions"))
        };
        let operands: Vec<Vec<Label>> =
            terms.iter().zip(ranks).map(operand).collect::<Result<_, String>>()?;
        let output = match output {
            Some(term) => explicit(term, &operands)?,
            None => implicit(&operands),
        };
        Ok(Equation { operands, output })
    }
}

/// How many letters a term has, and where its ellipsis is.
fn split(term: &str) -> Result<(usize, Option<usize>), String> {
    let at = term.find("...");
    let letters = term.replacen("...", "", 1);
    match letters.chars().find(|c| !c.is_ascii_alphabetic()) {
        Some(c) => Err(format!("\"{c}\" in \"{term}\" is no letter and no ellipsis of its own")),
        None => Ok((letters.len(), at)),
    }
}

/// A term's labels, with `covered` dimensions for an ellipsis (`None`: there are more letters than dimensions).
fn labels(term: &str, covered: Option<usize>) -> Result<Vec<Label>, String> {
    let (letters, at) = split(term)?;
    let covered = covered.ok_or_else(|| format!("\"{term}\" names more than the operand's dimensions"))?;
    let mut labels: Vec<Label> = term.chars().filter(|&c| c != '.').map(Label::Letter).collect();
    if let Some(at) = at {
        labels.splice(at.min(letters)..at.min(letters), (0..covered).rev().map(Label::Ellipsis));
    }
    Ok(labels)
}

/// How many dimensions the operands' ellipses cover at most.
fn ellipsis(operands: &[Vec<Label>]) -> usize {
    let covered = |label: &Label| if let Label::Ellipsis(i) = label { i + 1 } else { 0 };
    operands.iter().flatten().map(covered).max().unwrap_or(0)
}

fn explicit(term: &str, operands: &[Vec<Label>]) -> Result<Vec<Label>, String> {
    let output = labels(term, Some(ellipsis(operands)))?;
    for (i, label) in output.iter().enumerate() {
        if output[..i].contains(label) {
            return Err(format!("the result \"{term}\" names a dimension twice"));
        }
        if !operands.iter().flatten().any(|l| l == label) {
            return Err(format!("the result \"{term}\" names a dimension that no operand has"));
        }
    }
    Ok(output)
}

/// Without a result: the ellipsis, then every letter that occurs once.
fn implicit(operands: &[Vec<Label>]) -> Vec<Label> {
    let mut counts = BTreeMap::new();
    for &label in operands.iter().flatten() {
        if matches!(label, Label::Letter(_)) {
            *counts.entry(label).or_insert(0) += 1;
        }
    }
    let ellipsis = (0..ellipsis(operands)).rev().map(Label::Ellipsis);
    ellipsis.chain(counts.into_iter().filter(|c| c.1 == 1).map(|c| c.0)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(labels: &[Label]) -> String {
        labels.iter().map(|label| format!("{label} ")).collect()
    }

    fn parsed(text: &str, ranks: &[usize]) -> Result<String, String> {
        let equation = Equation::parse(text, ranks)?;
        let operands: Vec<String> = equation.operands.iter().map(|o| shown(o)).collect();
        Ok(format!("{}-> {}", operands.join(", "), shown(&equation.output)))
    }

    #[test]
    fn equations_are_read() {
        assert_eq!(parsed(" i j , jk -> i k", &[2, 2]).unwrap(), "i j , j k -> i k ");
        assert_eq!(parsed("ba", &[2]).unwrap(), "b a -> a b ");
        assert_eq!(parsed("bA,aA", &[2, 2]).unwrap(), "b A , a A -> a b ");
        assert_eq!(parsed("bA", &[2]).unwrap(), "b A -> A b ");
        assert_eq!(parsed("ii", &[2]).unwrap(), "i i -> ");
        let batched = "i ...[-2] ...[-1] j , ...[-1] j k -> ...[-2] ...[-1] i k ";
        assert_eq!(parsed("i...j,...jk", &[4, 3]).unwrap(), batched);
        assert_eq!(parsed("...,...->...", &[0, 1]).unwrap(), ", ...[-1] -> ...[-1] ");
        assert_eq!(parsed("i...->i", &[2]).unwrap(), "i ...[-1] -> i ");
        assert_eq!(parsed(",->", &[0, 0]).unwrap(), ", -> ");
    }

    #[test]
    fn what_makes_no_sense_is_refused_with_the_reason() {
        for (text, ranks, why) in [
            ("ij,jk->ik", &[2][..], "2 operands, and 1 came"),
            ("ij", &[3], "does not name 3"),
            ("ijk", &[2], "more than"),
            ("i1", &[2], "no letter"),
            ("i..", &[2], "no letter"),
            ("......", &[2], "no letter"),
            ("ij->ii", &[2], "twice"),
            ("ij->ik", &[2], "no operand has"),
            ("ij->j->i", &[2], "no letter"),
        ] {
            let message = parsed(text, ranks).unwrap_err();
            assert!(message.contains(why), "{text}: {message}");
        }
    }
}
