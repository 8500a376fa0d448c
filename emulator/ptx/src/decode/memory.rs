//! Loads, stores, atomic operations, conversions of addresses between spaces; asynchronous copies and barriers in
//! memory.

use super::names::Symbol;
use super::{Builder, Form, is_space};
use crate::ParseError;
use crate::code::{
    Access, Arrival, Asynchronous, Atomic, AtomicType, Bulk, NOWHERE, Op, Order, Preset, Reg, Scope, Send,
    Space, Update, ZERO,
};
use crate::lanes::{compare, convert, integer, map};
use crate::machine::{LOCAL_WINDOW, PARAMETER_WINDOW, SHARED_WINDOW};
use crate::syntax::{Operand, type_bytes};

impl Builder<'_> {
    /// The scope of a strong access or a fence.
    fn scope(&mut self, form: &Form) -> Scope {
        self.program.narrow |= form.scope() != Scope::Device;
        form.scope()
    }

    /// Decodes an instruction of this family, if it is one.
    pub(super) fn memory(&mut self, form: &Form, ops: &[Operand]) -> Result<bool, ParseError> {
        match form.name() {
            "ld" | "ldu" => self.load(form, ops)?,
            "st" if !form.has("async") => self.store(form, ops)?,
            "atom" | "red" if !form.has("async") => self.atomic(form, ops)?,
            "cvta" => self.cvta(form, ops)?,
            "istypep" => self.is_opaque(form, ops)?,
            "isspacep" => {
                self.want(ops, 2, 2)?;
                let (d, _) = self.destination(&ops[0])?;
                let a = self.source(&ops[1], "u64")?;
                self.push(Op::IsSpace(form.space()), d, &[a]);
            }
            "mapa" | "getctarank" => {
                self.want(ops, 2, 3)?;
                let (d, _) = self.destination(&ops[0])?;
                let (a, generic) = (self.source(&ops[1], "u64")?, form.space() == Space::Generic);
                if form.name() == "mapa" {
                    let b = self.source(&ops[2], "u32")?;
                    self.push(Op::MapShared { generic }, d, &[a, b]);
                } else {
                    self.push(Op::RankOfShared { generic }, d, &[a]);
                }
            }
            "fence" | "membar" => {
                let proxy = form.has("proxy") && form.has("async") && !form.has("global");
                let scope = self.scope(form);
                self.push(if proxy { Op::ProxyFence } else { Op::Fence(scope) }, ZERO, &[]);
            }
            "prefetch" | "prefetchu" | "discard" | "applypriority" => {
                self.push(Op::Nop, ZERO, &[]);
            }
            "createpolicy" => {
                let (d, _) = self.destination(&ops[0])?;
                self.map(integer::bits("mov", "b64"), d, &[ZERO])?;
            }
            _ => return Ok(false),
        }
        Ok(true)
    }

    /// The space of an access: a function's own parameters lie in local memory.
    fn access_space(&self, form: &Form, symbol: Option<Symbol>) -> Space {
        match (form.space(), symbol) {
            (_, Some(Symbol::Local(_))) => Space::Local,
            (Space::Generic, Some(Symbol::Shared(_) | Symbol::Dynamic)) => Space::Shared,
            (space, _) => space,
        }
    }

    fn load(&mut self, form: &Form, ops: &[Operand]) -> Result<(), ParseError> {
        self.want(ops, 2, 4)?;
        let Some(kind) = form.kind() else { return self.error("a type wanted") };
        let address = self.address(&ops[1])?;
        let size = type_bytes(kind).unwrap_or(4).min(8);
        let mut registers = Vec::new();
        let mut bits = 0;
        if kind == "b128" {
            registers = self.words(&ops[0])?;
        }
        for element in self.elements(&ops[0]).into_iter().filter(|_| kind != "b128") {
            let (reg, width) = self.destination(element)?;
            bits = bits.max(if reg == NOWHERE { 0 } else { width });
            registers.push(reg);
        }
        if !matches!(registers.len(), 1 | 2 | 4 | 8) {
            return self.error("1, 2, 4 or 8 elements wanted");
        }
        let extend = if kind.starts_with('s') && bits > size * 8 { bits as u8 } else { 0 };
        if let (Space::Parameter, Some(Symbol::Parameter(start))) = (form.space(), address.symbol) {
            return self.parameter(start as i64 + address.offset, size, extend, &registers);
        }
        let space = self.access_space(form, address.symbol);
        let (order, scope, constant) = (form.order(Order::Weak), self.scope(form), form.has("nc"));
        let (list, count) = (self.list(&registers), registers.len() as u8);
        let access = Access { space, size: size as u8, count, extend, order, scope, constant, list };
        let at = self.push(Op::Load(access), registers[0], &[address.base]);
        self.program.code[at].offset = address.offset;
        Ok(())
    }

    /// A kernel's parameter at a place that is known: the register holds it from the beginning.
    fn parameter(&mut self, at: i64, size: u32, extend: u8, registers: &[u32]) -> Result<(), ParseError> {
        let end = self.parameters.last().map_or(0, |p| p.offset + p.bytes) as i64;
        if at < 0 || at + size as i64 * registers.len() as i64 > end {
            return self.error("a load outside of the kernel's parameters");
        }
        for (i, &d) in registers.iter().enumerate().filter(|(_, d)| **d != NOWHERE) {
            let offset = at as u32 + i as u32 * size;
            let value = self.preset(Preset::Parameter { offset, size: size as u8, extend });
            self.map(integer::bits("mov", "b64"), d, &[value])?;
        }
        Ok(())
    }

    fn store(&mut self, form: &Form, ops: &[Operand]) -> Result<(), ParseError> {
        self.want(ops, 2, 3)?;
        let Some(kind) = form.kind() else { return self.error("a type wanted") };
        let address = self.address(&ops[0])?;
        let size = type_bytes(kind).unwrap_or(4).min(8);
        let registers = self.sources(&ops[1], kind)?;
        let space = self.access_space(form, address.symbol);
        let (order, scope) = (form.order(Order::Weak), self.scope(form));
        let (list, count) = (self.list(&registers), registers.len() as u8);
        let size = size as u8;
        let access = Access { space, size, count, extend: 0, order, scope, constant: false, list };
        let at = self.push(Op::Store(access), NOWHERE, &[address.base, registers[0]]);
        self.program.code[at].offset = address.offset;
        Ok(())
    }

    fn atomic(&mut self, form: &Form, ops: &[Operand]) -> Result<(), ParseError> {
        let returns = form.name() == "atom";
        let first = returns as usize;
        self.want(ops, 2 + first, 5)?;
        let Some(kind) = form.kind() else { return self.error("a type wanted") };
        let update = match form.parts[1..].iter().find_map(|part| update(part)) {
            Some(update) => update,
            None => return self.error("unsupported atomic operation"),
        };
        let size = type_bytes(kind).unwrap_or(4).min(8);
        let address = self.address(&ops[first])?;
        let mut values = self.sources(&ops[first + 1], kind)?;
        let count = values.len();
        let mut destinations = vec![NOWHERE; count];
        if returns && kind == "b128" && ops[0] != Operand::Nothing {
            destinations = self.words(&ops[0])?;
        } else if returns {
            let elements = self.elements(&ops[0]);
            for (d, element) in destinations.iter_mut().zip(elements) {
                *d = self.destination(element)?.0;
            }
        }
        let new = match ops.get(first + 2) {
            Some(new) if update == Update::Swap => self.sources(new, kind)?,
            _ => vec![ZERO; count],
        };
        if destinations.len() != count || new.len() != count {
            return self.error("as many destinations and new values as values wanted");
        }
        let (d, b) = (destinations[0], values[0]);
        values.extend(destinations);
        values.extend(&new);
        let new = new[0];
        let list = self.list(&values);
        let (space, order) = (self.access_space(form, address.symbol), form.order(Order::Relaxed));
        let scope = self.scope(form);
        let atomic = Atomic {
            space,
            update,
            kind: atomic_type(kind),
            size: size as u8,
            order,
            scope,
            count: count as u8,
            list,
        };
        let at = self.push(Op::Atomic(atomic), d, &[address.base, b, new]);
        self.program.code[at].offset = address.offset;
        Ok(())
    }

    /// The registers of a source's elements; one of 128 bits has two.
    fn sources(&mut self, operand: &Operand, kind: &str) -> Result<Vec<Reg>, ParseError> {
        if kind == "b128" {
            return self.words(operand);
        }
        let mut registers = Vec::new();
        for element in self.elements(operand) {
            registers.push(self.source(element, kind)?);
        }
        Ok(registers)
    }

    /// `istypep.texref p, a`: whether an address is that of a variable of a type that only some instructions look into.
    fn is_opaque(&mut self, form: &Form, ops: &[Operand]) -> Result<(), ParseError> {
        self.want(ops, 2, 2)?;
        let (d, _) = self.destination(&ops[0])?;
        let a = self.source(&ops[1], "b64")?;
        let kind = form.part(1);
        let same = |name: &str| self.tree.variables.iter().any(|v| v.name == name && v.kind == kind);
        let variables: Vec<u32> =
            (0..self.variables.len() as u32).filter(|n| same(&self.variables[*n as usize].name)).collect();
        let mut found = ZERO;
        for number in variables {
            let (address, one, joined) =
                (self.preset(Preset::Variable(number, 0)), self.fresh(), self.fresh());
            self.map(compare::plain("eq", "b64", false), one, &[a, address])?;
            self.map(integer::bits("or", "pred"), joined, &[found, one])?;
            found = joined;
        }
        self.map(integer::bits("mov", "pred"), d, &[found])
    }

    fn cvta(&mut self, form: &Form, ops: &[Operand]) -> Result<(), ParseError> {
        self.want(ops, 2, 2)?;
        let (d, bits) = self.destination(&ops[0])?;
        let a = self.source(&ops[1], "u64")?;
        let window = match form.space() {
            Space::Shared => SHARED_WINDOW,
            Space::Local => LOCAL_WINDOW,
            Space::Parameter => PARAMETER_WINDOW,
            Space::Global | Space::Generic => 0,
        };
        let window = self.constant(window);
        let wide = if bits == 32 { convert::usual("u32", "u64") } else { integer::bits("mov", "b64") };
        let converted = self.fresh();
        // A null pointer stays one in every space.
        match form.has("to") {
            true => self.push(
                Op::Map(map!((a: u64, b: u64) -> u64 { if a == 0 { 0 } else { a.wrapping_sub(b) } })),
                converted,
                &[a, window],
            ),
            false => self.push(
                Op::Map(map!((a: u64, b: u64) -> u64 { a.wrapping_add(b) })),
                converted,
                &[a, window],
            ),
        };
        self.map(wide, d, &[converted])
    }
}

fn update(part: &str) -> Option<Update> {
    Some(match part {
        "add" => Update::Add,
        "min" => Update::Min,
        "max" => Update::Max,
        "and" => Update::And,
        "or" => Update::Or,
        "xor" => Update::Xor,
        "exch" => Update::Exchange,
        "cas" => Update::Swap,
        "inc" => Update::Increment,
        "dec" => Update::Decrement,
        _ => return None,
    })
}

fn atomic_type(kind: &str) -> AtomicType {
    match kind {
        "f16" => AtomicType::F16,
        "f16x2" => AtomicType::F16x2,
        "bf16" => AtomicType::Bf16,
        "bf16x2" => AtomicType::Bf16x2,
        "f32" => AtomicType::F32,
        "f64" => AtomicType::F64,
        kind if kind.starts_with('s') => AtomicType::Signed,
        _ => AtomicType::Bits,
    }
}

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
            "cp" if form.has("async") => self.copy(form, ops)?,
            "mbarrier" => self.mbarrier(form, ops)?,
            "st" | "red" => self.send(form, ops)?,
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
    fn copy(&mut self, form: &Form, ops: &[Operand]) -> Result<(), ParseError> {
        self.want(ops, 3, 5)?;
        let (to, from) = (self.moved(&ops[0])?, self.moved(&ops[1])?);
        let Operand::Integer(size) = ops[2] else { return self.error("a number of bytes wanted") };
        if !matches!(size, 4 | 8 | 16) {
            return self.error("copies of 4, 8 or 16 bytes wanted");
        }
        let (whole, policy) = (self.constant(size), form.has("L2::cache_hint") as usize);
        let bytes = match ops.get(3).filter(|_| ops.len() > 3 + policy) {
            // A predicate says that nothing is read.
            Some(Operand::Name(name, 0)) if matches!(self.names.find(name), Some(Symbol::Register(_, 1))) => {
                let (none, bytes) = (self.register(name)?.0, self.fresh());
                self.map(integer::bits("selp", "b32"), bytes, &[ZERO, whole, none])?;
                bytes
            }
            Some(operand) => self.source(operand, "u32")?,
            None => whole,
        };
        self.push_asynchronous(Asynchronous::Copy { size: size as u8 }, NOWHERE, &[to, from, bytes]);
        Ok(())
    }

    fn mbarrier(&mut self, form: &Form, ops: &[Operand]) -> Result<(), ParseError> {
        let generic = form.space() == Space::Generic;
        match form.part(1) {
            "init" => {
                let (address, count) = (self.moved(&ops[0])?, self.source(&ops[1], "u32")?);
                self.push_asynchronous(Asynchronous::MbarrierInit { generic }, NOWHERE, &[address, count]);
            }
            "inval" => {
                let address = self.moved(&ops[0])?;
                self.push_asynchronous(Asynchronous::MbarrierInvalidate { generic }, NOWHERE, &[address]);
            }
            "expect_tx" | "complete_tx" => {
                let (address, bytes) = (self.moved(&ops[0])?, self.source(&ops[1], "u32")?);
                let op = Asynchronous::MbarrierBytes { generic, expect: form.part(1) == "expect_tx" };
                self.push_asynchronous(op, NOWHERE, &[address, bytes]);
            }
            "arrive" | "arrive_drop" => {
                let plain = !matches!(ops[0], Operand::Address(_));
                let d = if plain { self.destination(&ops[0])?.0 } else { NOWHERE };
                let ops = &ops[plain as usize..];
                let expect = form.has("expect_tx");
                let Some(address) = ops.first() else { return self.error("a barrier wanted") };
                let address = self.moved(address)?;
                let number = match ops.get(1) {
                    Some(number) => self.source(number, "u32")?,
                    None => self.constant(1),
                };
                let (drop, relaxed) = (form.part(1) == "arrive_drop", form.has("relaxed"));
                let arrival = Arrival { generic, expect, drop, relaxed };
                self.push_asynchronous(Asynchronous::MbarrierArrive(arrival), d, &[address, number]);
            }
            "test_wait" | "try_wait" => {
                let (d, _) = self.destination(&ops[0])?;
                let (address, state) = (self.moved(&ops[1])?, self.source(&ops[2], "u64")?);
                let (parity, relaxed) = (form.has("parity"), form.has("relaxed"));
                let op = Asynchronous::MbarrierTest { generic, parity, relaxed };
                self.push_asynchronous(op, d, &[address, state]);
            }
            "pending_count" => {
                self.want(ops, 2, 2)?;
                let (d, state) = (self.destination(&ops[0])?.0, self.source(&ops[1], "b64")?);
                self.push_asynchronous(Asynchronous::MbarrierPending, d, &[state]);
            }
            _ => return self.error("unsupported instruction on a barrier in memory"),
        }
        Ok(())
    }

    /// `st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [d], {a, b}, [barrier]`, and `red.async`
    fn send(&mut self, form: &Form, ops: &[Operand]) -> Result<(), ParseError> {
        self.want(ops, 3, 3)?;
        if !form.has("shared::cluster") || !form.begins("mbarrier::complete_tx") {
            return self.error("unsupported: asynchronous stores without a barrier in shared memory");
        }
        let reduce = (form.name() == "red").then(|| self.reduction(form)).transpose()?;
        let kind = form.kind().unwrap_or("b32");
        let (to, barrier) = (self.moved(&ops[0])?, self.moved(&ops[2])?);
        let (list, count) = self.registers(&ops[1], kind)?;
        let send = Send { size: type_bytes(kind).unwrap_or(4) as u8, count: count as u8, list, reduce };
        self.push_asynchronous(Asynchronous::Send(send), NOWHERE, &[to, ZERO, ZERO, barrier]);
        Ok(())
    }

    fn bulk(&mut self, form: &Form, ops: &[Operand]) -> Result<(), ParseError> {
        match () {
            () if form.has("prefetch") => {
                self.push(Op::Nop, ZERO, &[]);
                return Ok(());
            }
            () if form.has("commit_group") => {
                self.push_asynchronous(Asynchronous::BulkCommit, NOWHERE, &[]);
                return Ok(());
            }
            () if form.has("wait_group") => {
                let n = self.source(&ops[0], "u32")?;
                let read = form.has("read");
                self.push_asynchronous(Asynchronous::BulkWait { read }, NOWHERE, &[n]);
                return Ok(());
            }
            () => {}
        }
        let reduce = form.has("reduce").then(|| self.reduction(form)).transpose()?;
        let ends: Vec<&str> = form.parts[1..].iter().copied().filter(|part| is_space(part)).collect();
        let [to, from] = ends[..] else { return self.error("two state spaces wanted") };
        let space = |name: &str| if name == "global" { Space::Global } else { Space::Shared };
        let multicast = form.begins("multicast");
        let mut bulk =
            Bulk { to: space(to), from: space(from), rank: 0, reduce, list: 0, barrier: false, multicast };
        if form.has("cp_mask") {
            return self.error("unsupported: copies of some bytes");
        }
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

    fn reduction(&mut self, form: &Form) -> Result<(Update, AtomicType, u8), ParseError> {
        let found = form.parts[1..].iter().find_map(|part| update(part));
        let Some(update) = found.filter(|u| !matches!(u, Update::Exchange | Update::Swap)) else {
            return self.error("unsupported reduction");
        };
        // A tensor's map says the type; f32 stands in until the copy reads the map.
        let kind = form.kind().unwrap_or("f32");
        Ok((update, atomic_type(kind), type_bytes(kind).unwrap_or(4) as u8))
    }
}
