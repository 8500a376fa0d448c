//! Branches and the ends of threads; barriers, and operations for which lanes of a warp wait for each other.

use super::names::Symbol;
use super::{Builder, Form};
use crate::ParseError;
use crate::code::{Barrier, BarrierKind, Collective, NOWHERE, Op, Shuffle, ZERO};
use crate::syntax::{Operand, type_bytes};

impl Builder<'_> {
    /// Decodes an instruction of this family, if it is one.
    pub(super) fn control(&mut self, form: &Form, ops: &[Operand]) -> Result<bool, ParseError> {
        let op = match form.name() {
            "bra" => return self.branch(ops).map(|()| true),
            "brx" => return self.indexed(ops).map(|()| true),
            "call" => return self.call(ops).map(|()| true),
            "alloca" | "stacksave" | "stackrestore" => return self.stack(form.name(), ops).map(|()| true),
            "ret" => Op::Return,
            "exit" => Op::Exit,
            "trap" => Op::Trap,
            "nanosleep" => Op::Yield,
            "griddepcontrol" | "setmaxnreg" | "pmevent" | "brkpt" => Op::Nop,
            _ => return Ok(false),
        };
        self.push(op, ZERO, &[]);
        Ok(true)
    }

    fn branch(&mut self, ops: &[Operand]) -> Result<(), ParseError> {
        let [Operand::Name(label, 0)] = ops else { return self.error("a label wanted") };
        let at = self.push(Op::Branch(0), ZERO, &[]);
        self.branches.push((at, self.names.scope(), label.clone()));
        Ok(())
    }

    fn indexed(&mut self, ops: &[Operand]) -> Result<(), ParseError> {
        let [index, Operand::Name(table, 0)] = ops else { return self.error("an index and a table wanted") };
        let index = self.source(index, "u32")?;
        let Some(Symbol::Table(table)) = self.names.find(table) else {
            return self.error("no table of targets");
        };
        self.push(Op::BranchTable(table), ZERO, &[index]);
        Ok(())
    }
}

impl Builder<'_> {
    /// Decodes an instruction of this family, if it is one.
    pub(super) fn together(&mut self, form: &Form, ops: &[Operand]) -> Result<bool, ParseError> {
        match form.name() {
            "shfl" => self.shuffle(form, ops)?,
            "vote" => self.vote(form, ops)?,
            "match" => self.matched(form, ops)?,
            "redux" => self.reduce(form, ops)?,
            "activemask" => {
                let (d, _) = self.destination(&ops[0])?;
                self.push(Op::ActiveMask, d, &[]);
            }
            "elect" => {
                self.want(ops, 2, 2)?;
                let (d, p) = self.pair(&ops[0])?;
                let mask = self.source(&ops[1], "b32")?;
                self.push(Op::Collective(Collective::Elect, p), d, &[ZERO, ZERO, ZERO, mask]);
            }
            "bar" | "barrier" if form.has("warp") => {
                let mask = self.source(&ops[0], "b32")?;
                self.push(
                    Op::Collective(Collective::Synchronize, NOWHERE),
                    NOWHERE,
                    &[ZERO, ZERO, ZERO, mask],
                );
            }
            "barrier" if form.has("cluster") => {
                let kind = match () {
                    () if !form.has("arrive") => BarrierKind::ClusterWait,
                    () if form.has("relaxed") => BarrierKind::ClusterArriveRelaxed,
                    () => BarrierKind::ClusterArrive,
                };
                self.push(Op::Barrier(Barrier { kind, aligned: form.has("aligned") }), NOWHERE, &[]);
            }
            "bar" | "barrier" => self.barrier(form, ops)?,
            _ => return Ok(false),
        }
        Ok(true)
    }

    /// `d|p`
    fn pair(&mut self, operand: &Operand) -> Result<(u32, u32), ParseError> {
        match operand {
            Operand::Pair(d, p) => Ok((self.destination(d)?.0, self.destination(p)?.0)),
            d => Ok((self.destination(d)?.0, NOWHERE)),
        }
    }

    fn shuffle(&mut self, form: &Form, ops: &[Operand]) -> Result<(), ParseError> {
        if !form.has("sync") {
            return self.error("unsupported: `shfl` without `.sync`");
        }
        self.want(ops, 5, 5)?;
        let way = match () {
            () if form.has("up") => Shuffle::Up,
            () if form.has("down") => Shuffle::Down,
            () if form.has("bfly") => Shuffle::Butterfly,
            () => Shuffle::Index,
        };
        let (d, p) = self.pair(&ops[0])?;
        let mut sources = Vec::new();
        for operand in &ops[1..] {
            sources.push(self.source(operand, "b32")?);
        }
        self.push(Op::Collective(Collective::Shuffle(way), p), d, &sources);
        Ok(())
    }

    fn vote(&mut self, form: &Form, ops: &[Operand]) -> Result<(), ParseError> {
        if !form.has("sync") {
            return self.error("unsupported: `vote` without `.sync`");
        }
        self.want(ops, 3, 3)?;
        let kind = match () {
            () if form.has("ballot") => Collective::Ballot,
            () if form.has("all") => Collective::VoteAll,
            () if form.has("any") => Collective::VoteAny,
            () => Collective::VoteUniform,
        };
        let (d, _) = self.destination(&ops[0])?;
        let (a, mask) = (self.source(&ops[1], "pred")?, self.source(&ops[2], "b32")?);
        self.push(Op::Collective(kind, NOWHERE), d, &[a, ZERO, ZERO, mask]);
        Ok(())
    }

    fn matched(&mut self, form: &Form, ops: &[Operand]) -> Result<(), ParseError> {
        self.want(ops, 3, 3)?;
        let kind = form.kind().unwrap_or("b32");
        let size = type_bytes(kind).unwrap_or(4) as u8;
        let op = if form.has("all") { Collective::MatchAll(size) } else { Collective::MatchAny(size) };
        let (d, p) = self.pair(&ops[0])?;
        let (a, mask) = (self.source(&ops[1], kind)?, self.source(&ops[2], "b32")?);
        self.push(Op::Collective(op, p), d, &[a, ZERO, ZERO, mask]);
        Ok(())
    }

    fn reduce(&mut self, form: &Form, ops: &[Operand]) -> Result<(), ParseError> {
        self.want(ops, 3, 3)?;
        let signed = form.kind() == Some("s32");
        if form.kind() == Some("f32") {
            return self.error("unsupported: reductions of f32");
        }
        let op = match form.part(2) {
            "add" => Collective::ReduceAdd,
            "min" => Collective::ReduceMin(signed),
            "max" => Collective::ReduceMax(signed),
            "and" => Collective::ReduceAnd,
            "or" => Collective::ReduceOr,
            "xor" => Collective::ReduceXor,
            _ => return self.error("unsupported reduction"),
        };
        let (d, _) = self.destination(&ops[0])?;
        let (a, mask) = (self.source(&ops[1], "b32")?, self.source(&ops[2], "b32")?);
        self.push(Op::Collective(op, NOWHERE), d, &[a, ZERO, ZERO, mask]);
        Ok(())
    }

    /// `bar.sync a, b`, `bar.red.op d, a, b, p`; all of `bar` and `barrier` with `.aligned` is aligned.
    fn barrier(&mut self, form: &Form, ops: &[Operand]) -> Result<(), ParseError> {
        self.want(ops, 1, 4)?;
        let aligned = form.name() == "bar" || form.has("aligned");
        let (mut rest, mut d, mut predicate) = (ops, NOWHERE, ZERO);
        let kind = match () {
            () if form.has("arrive") => BarrierKind::Arrive,
            () if form.has("popc") => BarrierKind::Count,
            () if form.has("and") => BarrierKind::All,
            () if form.has("or") => BarrierKind::Any,
            () => BarrierKind::Sync,
        };
        if form.has("red") {
            d = self.destination(&ops[0])?.0;
            predicate = self.source(&ops[ops.len() - 1], "pred")?;
            rest = &ops[1..ops.len() - 1];
        }
        let [number, count @ ..] = rest else { return self.error("a barrier's number wanted") };
        let a = self.source(number, "u32")?;
        let b = if let [count] = count { self.source(count, "u32")? } else { ZERO };
        self.push(Op::Barrier(Barrier { kind, aligned }), d, &[a, b, predicate]);
        Ok(())
    }
}
