//! Copies that run beside the threads, and the barriers in memory that they arrive at.

use super::Builder;
use super::form::Form;
use crate::ParseError;
use crate::code::{Arrival, Asynchronous, Bulk, Kind, NOWHERE, Op, Reg, Space, Update, ZERO};
use crate::syntax::Operand;

impl Builder<'_> {
    /// Decodes an instruction of this family, if it is one.
    pub(super) fn asynchronous(&mut self, form: &Form, ops: &[Operand]) -> Result<bool, ParseError> {
        match form.name() {
            "cp" if form.has("bulk") => self.bulk(form, ops)?,
            "cp" if form.has("mbarrier") => {
                let noinc = form.has("noinc");
                let base = self.moved(&ops[0])?;
                self.push_asynchronous(Asynchronous::CopyArrive { noinc }, NOWHERE, &[base]);
            }
            "cp" if form.has("commit_group") => self.push_asynchronous(Asynchronous::Commit, NOWHERE, &[]),
            "cp" if form.has("wait_group") => {
                let n = self.source(&ops[0], "u32")?;
                self.push_asynchronous(Asynchronous::Wait, NOWHERE, &[n]);
            }
            "cp" if form.has("wait_all") => self.push_asynchronous(Asynchronous::WaitAll, NOWHERE, &[]),
            "cp" if form.has("async") => self.copy(ops)?,
            "mbarrier" => self.mbarrier(form, ops)?,
            _ => return Ok(false),
        }
        Ok(true)
    }

    fn push_asynchronous(&mut self, op: Asynchronous, d: Reg, sources: &[Reg]) {
        let number = self.program.asynchronous.len() as u32;
        self.program.asynchronous.push(op);
        self.push(Op::Asynchronous(number), d, sources);
    }

    /// An address as one register, whatever is added to it.
    fn moved(&mut self, operand: &Operand) -> Result<Reg, ParseError> {
        let address = self.address(operand)?;
        if address.offset == 0 {
            return Ok(address.base);
        }
        let (d, added) = (self.fresh(), self.constant(address.offset as u64));
        self.map(crate::lanes::integer::plain("add", "u64"), d, &[address.base, added])?;
        Ok(d)
    }

    /// `cp.async.cg.shared.global [d], [s], 16, bytes`
    fn copy(&mut self, ops: &[Operand]) -> Result<(), ParseError> {
        self.want(ops, 3, 5)?;
        let (to, from) = (self.moved(&ops[0])?, self.moved(&ops[1])?);
        let Operand::Integer(size) = ops[2] else { return self.error("a number of bytes wanted") };
        if !matches!(size, 4 | 8 | 16) {
            return self.error("copies of 4, 8 or 16 bytes wanted");
        }
        let bytes = match ops.get(3) {
            // Only with all operands is the fourth the number of bytes and the fifth a cache policy.
            Some(operand) => self.source(operand, "u32")?,
            None => self.constant(size),
        };
        self.push_asynchronous(Asynchronous::Copy { size: size as u8 }, NOWHERE, &[to, from, bytes]);
        Ok(())
    }

    fn mbarrier(&mut self, form: &Form, ops: &[Operand]) -> Result<(), ParseError> {
        let generic = form.space() == Space::Generic;
        match form.parts[1] {
            "init" => {
                let (address, count) = (self.moved(&ops[0])?, self.source(&ops[1], "u32")?);
                self.push_asynchronous(Asynchronous::BarrierInit { generic }, NOWHERE, &[address, count]);
            }
            "inval" => {
                let address = self.moved(&ops[0])?;
                self.push_asynchronous(Asynchronous::BarrierInvalid { generic }, NOWHERE, &[address]);
            }
            "expect_tx" | "complete_tx" => {
                let (address, bytes) = (self.moved(&ops[0])?, self.source(&ops[1], "u32")?);
                let op = Asynchronous::BarrierBytes { generic, expect: form.parts[1] == "expect_tx" };
                self.push_asynchronous(op, NOWHERE, &[address, bytes]);
            }
            "arrive" | "arrive_drop" => {
                let plain = !matches!(ops[0], Operand::Address(_));
                let d = if plain { self.destination(&ops[0])?.0 } else { NOWHERE };
                let ops = &ops[plain as usize..];
                let expect = form.has("expect_tx");
                let address = self.moved(&ops[0])?;
                let number = match ops.get(1) {
                    Some(number) => self.source(number, "u32")?,
                    None => self.constant(1),
                };
                let arrival = Arrival { generic, expect, drop: form.parts[1] == "arrive_drop" };
                self.push_asynchronous(Asynchronous::BarrierArrive(arrival), d, &[address, number]);
            }
            "test_wait" | "try_wait" => {
                let (d, _) = self.destination(&ops[0])?;
                let (address, state) = (self.moved(&ops[1])?, self.source(&ops[2], "u64")?);
                let op = Asynchronous::BarrierTest { generic, parity: form.has("parity") };
                self.push_asynchronous(op, d, &[address, state]);
            }
            _ => return self.error("unsupported instruction on a barrier in memory"),
        }
        Ok(())
    }

    fn bulk(&mut self, form: &Form, ops: &[Operand]) -> Result<(), ParseError> {
        if form.has("commit_group") || form.has("wait_group") || form.has("prefetch") {
            self.push(Op::Nop, ZERO, &[]);
            return Ok(());
        }
        let reduce = form.has("reduce").then(|| self.reduction(form)).transpose()?;
        let ends: Vec<&str> =
            form.parts[1..].iter().copied().filter(|p| *p == "global" || p.starts_with("shared")).collect();
        let [to, from] = ends[..] else { return self.error("two state spaces wanted") };
        let space = |name: &str| if name == "global" { Space::Global } else { Space::Shared };
        let multicast = form.begins("multicast");
        let mut bulk =
            Bulk { to: space(to), from: space(from), rank: 0, reduce, list: 0, barrier: false, multicast };
        if form.has("tensor") {
            return self.tensor(form, ops, bulk);
        }
        let (d, s, size) = (self.moved(&ops[0])?, self.moved(&ops[1])?, self.source(&ops[2], "u32")?);
        let mut barrier = ZERO;
        let mut rest = &ops[3..];
        if let [address @ Operand::Address(_), more @ ..] = rest {
            (barrier, bulk.barrier, rest) = (self.moved(address)?, true, more);
        }
        if let ([mask, ..], true) = (rest, multicast) {
            let mask = self.source(mask, "u16")?;
            bulk.list = self.list(&[mask]);
        }
        self.push_asynchronous(Asynchronous::Bulk(bulk), NOWHERE, &[d, s, size, barrier]);
        Ok(())
    }

    /// `[d], [map, {x, y}], [barrier]`, or `[map, {x, y}], [s]`
    fn tensor(&mut self, form: &Form, ops: &[Operand], mut bulk: Bulk) -> Result<(), ParseError> {
        if form.begins("im2col") {
            return self.error("unsupported: im2col");
        }
        let loads = bulk.to == Space::Shared;
        let (shared, map) = if loads { (&ops[0], &ops[1]) } else { (&ops[1], &ops[0]) };
        let Operand::Address(parts) = map else { return self.error("a tensor map wanted") };
        let [_, Operand::Vector(coordinates)] = &parts[..] else { return self.error("coordinates wanted") };
        let (shared, map) = (self.moved(shared)?, self.moved(map)?);
        let mut registers = Vec::new();
        for coordinate in coordinates {
            registers.push(self.source(coordinate, "s32")?);
        }
        bulk.rank = registers.len() as u8;
        let mut barrier = ZERO;
        if loads {
            (barrier, bulk.barrier) = (self.moved(&ops[2])?, true);
            if bulk.multicast {
                registers.push(self.source(&ops[3], "u16")?);
            }
        }
        bulk.list = self.list(&registers);
        self.push_asynchronous(Asynchronous::Bulk(bulk), NOWHERE, &[shared, map, ZERO, barrier]);
        Ok(())
    }

    fn reduction(&mut self, form: &Form) -> Result<(Update, Kind, u8), ParseError> {
        let update = match form
            .parts
            .iter()
            .find(|p| matches!(**p, "add" | "min" | "max" | "and" | "or" | "xor" | "inc" | "dec"))
        {
            Some(&"add") => Update::Add,
            Some(&"min") => Update::Min,
            Some(&"max") => Update::Max,
            Some(&"and") => Update::And,
            Some(&"or") => Update::Or,
            Some(&"xor") => Update::Xor,
            Some(&"inc") => Update::Increment,
            Some(_) => Update::Decrement,
            None => return self.error("unsupported reduction"),
        };
        // A tensor's map says the type; 4-byte floats stand in until it is read.
        Ok(match form.kind() {
            Some("f16") => (update, Kind::F16, 2),
            Some("bf16") => (update, Kind::Bf16, 2),
            Some("f64") => (update, Kind::F64, 8),
            Some("s32") => (update, Kind::Signed, 4),
            Some("s64") => (update, Kind::Signed, 8),
            Some("u64" | "b64") => (update, Kind::Bits, 8),
            Some("f32") | None => (update, Kind::F32, 4),
            Some(_) => (update, Kind::Bits, 4),
        })
    }
}
