//! Instructions on parts of words: `vadd`, `vset2`, `vabsdiff4` and their like.

use super::{Builder, Form};
use crate::ParseError;
use crate::code::{Op, Reg, ZERO};
use crate::lanes::video::{self, Merge, Video};
use crate::syntax::Operand;

/// `%r1.h0` as the register and what is picked of it.
fn picked(operand: &Operand) -> (Operand, String) {
    if let Operand::Name(name, 0) = operand
        && let Some((register, parts)) = name.rsplit_once('.')
        && let Some(numbers) = parts.strip_prefix(['b', 'h'])
        && !numbers.is_empty()
        && numbers.bytes().all(|digit| digit.is_ascii_digit())
    {
        return (Operand::Name(register.into(), 0), parts.into());
    }
    (operand.clone(), String::new())
}

/// The numbers of `b3210`, the last first.
fn numbers(parts: &str) -> Vec<u8> {
    parts.bytes().skip(1).rev().map(|digit| digit.wrapping_sub(b'0') & 7).collect()
}

impl Builder<'_> {
    /// `vadd4.u32.u32.u32.sat d.b3210, a.b7531, b, c`
    pub(super) fn video(&mut self, form: &Form, ops: &[Operand]) -> Result<bool, ParseError> {
        let stem = form.name().trim_end_matches(['2', '4']);
        let compares = |part: &&&str| matches!(**part, "lt" | "le" | "gt" | "ge" | "eq" | "ne");
        let comparison = form.parts[1..].iter().find(compares);
        let join = stem.strip_prefix('v').and_then(|name| video::join(name, comparison.unwrap_or(&"")));
        let (Some(join), [a_kind, b_kind]) = (join, &last_two(&form.kinds())[..]) else { return Ok(false) };
        let part: u8 = if form.name().ends_with('4') {
            1
        } else if form.name().ends_with('2') {
            2
        } else {
            4
        };
        self.want(ops, 3, 4)?;
        let [(d, to), (a, from_a), (b, from_b)] = [&ops[0], &ops[1], &ops[2]].map(picked);
        let mut video = Video {
            join,
            merge: Merge::Parts,
            part,
            mask: 15 >> (4 - 4 / part),
            signed: [
                a_kind.starts_with('s'),
                b_kind.starts_with('s'),
                stem != "vset" && form.part(1).starts_with('s'),
            ],
            saturate: form.has("sat"),
            wrap: form.has("wrap"),
            // The parts of A are the first ones of both sources, those of B the ones behind them.
            picked: [[0, 1, 2, 3], [0, 1, 2, 3].map(|at| 4 / part + at)],
            width: [part; 2],
        };
        for (source, parts) in [from_a, from_b].iter().enumerate().filter(|(_, parts)| !parts.is_empty()) {
            if part == 4 {
                video.width[source] = if parts.starts_with('b') { 1 } else { 2 };
            }
            // A word is made of a part of its own source.
            let first = if part == 4 { source as u8 * 4 / video.width[source] } else { 0 };
            numbers(parts).iter().zip(&mut video.picked[source]).for_each(|(at, to)| *to = first + at);
        }
        if !to.is_empty() {
            let at = numbers(&to);
            match (part, to.starts_with('b')) {
                (4, true) => video.merge = Merge::Byte(at[0] & 3),
                (4, false) => video.merge = Merge::Half(at[0] & 1),
                _ => video.mask = at.iter().fold(0, |mask, at| mask | 1 << at),
            }
        }
        let merges = [("add", Merge::Add), ("min", Merge::Minimum), ("max", Merge::Maximum)];
        if let Some((_, merge)) = merges.into_iter().find(|(name, _)| form.has(name)) {
            video.merge = merge;
        }
        let (d, _) = self.destination(&d)?;
        let (a, b) = (self.source(&a, "b32")?, self.source(&b, "b32")?);
        let c = ops.get(3).map_or(Ok::<Reg, ParseError>(ZERO), |c| self.source(c, "b32"))?;
        let what = self.constant(video.pack());
        self.push(Op::Map(video::video()), d, &[a, b, c, what]);
        Ok(true)
    }
}

/// The types of A and B, which stand last.
fn last_two<'k>(kinds: &[&'k str]) -> Vec<&'k str> {
    kinds[kinds.len().saturating_sub(2)..].to_vec()
}
