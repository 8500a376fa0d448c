//! Shuffles, votes and the like: lanes wait until all that the mask names are there.

use super::state::{Machine, Next, Origin, Outcome, Unwritten, Warp};
use crate::FaultKind;
use crate::code::{Collective, Instruction, NOWHERE, Op, Reg, Shuffle};
use crate::lanes::{LANES, Lanes, lanes};

impl Machine<'_> {
    /// Lanes come to an operation. If all that its mask names are here it is carried out, otherwise they wait.
    pub(crate) fn meet(
        &mut self,
        warp: &mut Warp,
        pc: u32,
        i: &Instruction,
        (op, p): (Collective, Reg),
        mask: u32,
        active: u32,
    ) -> Outcome<Next> {
        let masks = *warp.get(i.e);
        let named = masks[mask.trailing_zeros() as usize] as u32;
        let uniform = lanes(mask).all(|l| masks[l] as u32 == named);
        if uniform && named & mask == mask && named & warp.live & !mask == 0 {
            self.carry_out(warp, pc, (op, p), mask)?;
            return Ok(Next::On);
        }
        if let Some(l) = lanes(mask).find(|&l| masks[l] >> l & 1 == 0) {
            let message =
                format!("lane {l} takes part with mask {:#010x}, which does not name it", masks[l] as u32);
            return self.fault(FaultKind::DivergentShuffle, warp, i, l, message);
        }
        self.wait_at_warp_op(warp, pc, mask, active);
        self.finish_warp_ops(warp)?;
        Ok(Next::Apart)
    }

    /// Lanes wait for others.
    pub(crate) fn wait_at_warp_op(&mut self, warp: &mut Warp, pc: u32, mask: u32, active: u32) {
        if warp.at_warp_op == 0 {
            warp.worked = 0;
        }
        warp.move_to(mask, pc);
        warp.move_to(active & !mask, pc + 1);
        warp.at_warp_op |= mask;
    }

    /// Carries out every operation whose lanes are all there.
    pub(crate) fn finish_warp_ops(&mut self, warp: &mut Warp) -> Outcome<()> {
        let program = self.program;
        let mut rest = warp.at_warp_op;
        while rest != 0 {
            let first = rest.trailing_zeros() as usize;
            let of = |l: usize| &program.code[warp.pc[l] as usize];
            let named = warp.get(of(first).e)[first] as u32;
            let Op::Collective(op, _) = of(first).op else {
                rest &= !self.finish_matrix(warp, first)?;
                continue;
            };
            let with = |l: &usize| {
                matches!(of(*l).op, Op::Collective(other, _) if other == op)
                    && warp.get(of(*l).e)[*l] as u32 == named
            };
            let all = lanes(rest).filter(with).fold(0u32, |m, l| m | 1 << l);
            rest &= !all;
            if named & warp.live & !all != 0 {
                continue;
            }
            let start = warp.pc[first];
            if lanes(all).all(|l| warp.pc[l] == start) {
                let Op::Collective(op, p) = of(first).op else { return Ok(()) };
                self.carry_out(warp, start, (op, p), all)?;
            } else {
                self.carry_out_apart(warp, op, all)?;
            }
            for l in lanes(all) {
                warp.pc[l] += 1;
            }
            warp.at_warp_op &= !all;
        }
        Ok(())
    }

    fn carry_out(&mut self, warp: &mut Warp, pc: u32, (op, p): (Collective, Reg), all: u32) -> Outcome<()> {
        if op == Collective::Synchronize {
            self.clocks.lanes_meet(warp.resident, all, warp.live & !all == 0);
            return Ok(());
        }
        let i = &self.program.code[pc as usize];
        let sources = [warp.get(i.a), warp.get(i.b), warp.get(i.c)];
        let (values, predicates) = result(op, sources, all);
        if let Collective::Shuffle(way) = op
            && (all != u32::MAX || !warp.unwritten.is_empty())
        {
            let from = read_lanes(way, [sources[1], sources[2]], all);
            self.shuffle_unwritten(warp, &[pc; LANES], &from, all)?;
        }
        warp.set(i.d, all, &values);
        if p != NOWHERE {
            warp.set(p, all, &predicates);
        }
        Ok(())
    }

    /// The same where lanes have come by different instructions.
    #[cold]
    fn carry_out_apart(&mut self, warp: &mut Warp, op: Collective, all: u32) -> Outcome<()> {
        if op == Collective::Synchronize {
            self.clocks.lanes_meet(warp.resident, all, warp.live & !all == 0);
            return Ok(());
        }
        let program = self.program;
        let pcs = warp.pc;
        let mut sources = [[0; LANES]; 3];
        for l in lanes(all) {
            let i = &program.code[pcs[l] as usize];
            for (source, reg) in sources.iter_mut().zip([i.a, i.b, i.c]) {
                source[l] = warp.get(reg)[l];
            }
        }
        let [a, b, c] = &sources;
        let (values, predicates) = result(op, [a, b, c], all);
        if let Collective::Shuffle(way) = op {
            self.shuffle_unwritten(warp, &pcs, &read_lanes(way, [b, c], all), all)?;
        }
        for l in lanes(all) {
            let i = &program.code[pcs[l] as usize];
            let Op::Collective(_, p) = i.op else { continue };
            warp.set(i.d, 1 << l, &values);
            if p != NOWHERE {
                warp.set(p, 1 << l, &predicates);
            }
        }
        Ok(())
    }

    /// What lanes of a shuffle get of unwritten bytes, each by its instruction from the lane that it reads: those that this lane has, or all if
    /// it does not take part. (CUDA C++ Programming Guide, 10.22: "If the target lane is inactive, the retrieved value is undefined.") Comes
    /// before the values, whose register may be the source.
    fn shuffle_unwritten(
        &self,
        warp: &mut Warp,
        pcs: &[u32; LANES],
        from: &[usize; LANES],
        all: u32,
    ) -> Outcome<()> {
        let program = self.program;
        let of = |l: usize| &program.code[pcs[l] as usize];
        let mut bytes = [0; LANES];
        let mut origins = [None; LANES];
        for l in lanes(all) {
            (bytes[l], origins[l]) = if all >> from[l] & 1 == 0 {
                (0x0f, Some((pcs[l], Origin::Lane { to: l, from: from[l] })))
            } else {
                let known = warp.unwritten.get(&of(from[l]).a).filter(|known| known.bytes[from[l]] != 0);
                known.map_or((0, None), |known| (known.bytes[from[l]], Some((known.pc, known.origin))))
            };
        }
        let mut left = all;
        while left != 0 {
            let first = left.trailing_zeros() as usize;
            let by = lanes(left).filter(|&l| pcs[l] == pcs[first]).fold(0u32, |m, l| m | 1 << l);
            left &= !by;
            let i = of(first);
            let Some((lane, (pc, origin))) = lanes(by).find_map(|l| Some((l, origins[l]?))) else {
                warp.forget_unwritten(i.d, by);
                continue;
            };
            let found = Unwritten { bytes, pc, origin };
            if !self.checks.uninitialised {
                let message = self.unwritten_read(&found);
                return self.fault(FaultKind::DivergentShuffle, warp, i, lane, message);
            }
            self.note_unwritten(warp, i, by, found)?;
        }
        Ok(())
    }
}

/// The lane that each lane of a shuffle reads.
fn read_lanes(way: Shuffle, [b, c]: [&Lanes; 2], all: u32) -> [usize; LANES] {
    let mut from = [0; LANES];
    lanes(all).for_each(|l| from[l] = source(way, l as i64, b[l], c[l]).0);
    from
}

/// Values and predicates of all lanes.
fn result(op: Collective, [a, b, c]: [&Lanes; 3], all: u32) -> (Lanes, Lanes) {
    let mut values = [0; LANES];
    let mut predicates = [0; LANES];
    let yes = lanes(all).filter(|&l| a[l] & 1 == 1).fold(0u32, |m, l| m | 1 << l);
    let first = all.trailing_zeros() as usize;
    match op {
        Collective::Shuffle(way) => {
            for l in lanes(all) {
                let (from, valid) = source(way, l as i64, b[l], c[l]);
                values[l] = a[from];
                predicates[l] = valid as u64;
            }
        }
        Collective::VoteAll => values = [(yes == all) as u64; LANES],
        Collective::VoteAny => values = [(yes != 0) as u64; LANES],
        Collective::VoteUniform => values = [(yes == all || yes == 0) as u64; LANES],
        Collective::Ballot => values = [yes as u64; LANES],
        Collective::MatchAny(_) => {
            for l in lanes(all) {
                values[l] = lanes(all).filter(|&o| a[o] == a[l]).fold(0, |m, o| m | 1 << o);
            }
        }
        Collective::MatchAll(_) => {
            let same = lanes(all).all(|l| a[l] == a[first]);
            values = [if same { all as u64 } else { 0 }; LANES];
            predicates = [same as u64; LANES];
        }
        Collective::Elect => {
            values = [first as u64; LANES];
            predicates[first] = 1;
        }
        Collective::Synchronize => {}
        _ => {
            let numbers = lanes(all).map(|l| a[l] as u32);
            values = [reduced(op, numbers) as u64; LANES];
        }
    }
    (values, predicates)
}

fn reduced(op: Collective, numbers: impl Iterator<Item = u32>) -> u32 {
    let signed = |f: fn(i32, i32) -> i32| move |a: u32, b: u32| f(a as i32, b as i32) as u32;
    let found = match op {
        Collective::ReduceAdd => numbers.reduce(u32::wrapping_add),
        Collective::ReduceMin(true) => numbers.reduce(signed(i32::min)),
        Collective::ReduceMax(true) => numbers.reduce(signed(i32::max)),
        Collective::ReduceMin(false) => numbers.reduce(u32::min),
        Collective::ReduceMax(false) => numbers.reduce(u32::max),
        Collective::ReduceAnd => numbers.reduce(|a, b| a & b),
        Collective::ReduceOr => numbers.reduce(|a, b| a | b),
        _ => numbers.reduce(|a, b| a ^ b),
    };
    found.unwrap_or(0)
}

/// The lane that a shuffle reads, and whether it was in range: PTX's own words in numbers.
fn source(way: Shuffle, lane: i64, b: u64, c: u64) -> (usize, bool) {
    let (by, clamp, segment) = ((b & 31) as i64, (c & 31) as i64, (c >> 8 & 31) as i64);
    let (most, least) = (lane & segment | clamp & !segment, lane & segment);
    let (from, valid) = match way {
        Shuffle::Up => (lane - by, lane - by >= most),
        Shuffle::Down => (lane + by, lane + by <= most),
        Shuffle::Butterfly => (lane ^ by, (lane ^ by) <= most),
        Shuffle::Index => (least | by & !segment, (least | by & !segment) <= most),
    };
    (if valid { from } else { lane } as usize, valid)
}
