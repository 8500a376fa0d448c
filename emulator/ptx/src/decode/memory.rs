//! Loads, stores, atomic operations, conversions of addresses between spaces; asynchronous copies and barriers in
//! memory.

use super::names::Symbol;
use super::{Builder, Form};
use crate::ParseError;
use crate::code::{
    Access, Arrival, Asynchronous, Atomic, AtomicType, Bulk, NOWHERE, Op, Order, Preset, Reg, Scope, Space,
    Update, ZERO,
};
use crate::lanes::{convert, integer, map};
use crate::machine::{LOCAL_WINDOW, PARAMETER_WINDOW, SHARED_WINDOW};
use crate::syntax::{Operand, type_bytes};

impl Form<'_> {
    /// The state space that is named.
    pub(super) fn space(&self) -> Space {
        let named = |part: &&str| match *part {
            "global" | "const" => Some(Space::Global),
            "local" => Some(Space::Local),
            part if part.starts_with("param") => Some(Space::Parameter),
            part if part.starts_with("shared") => Some(Space::Shared),
            _ => None,
        };
        self.parts[1..].iter().find_map(named).unwrap_or(Space::Generic)
    }

    pub(super) fn order(&self, plain: Order) -> Order {
        match () {
            () if self.has("acq_rel") => Order::Both,
            () if self.has("acquire") => Order::Acquire,
            () if self.has("release") => Order::Release,
            () if self.has("relaxed") || self.has("volatile") || self.has("mmio") => Order::Relaxed,
            () => plain,
        }
    }

    fn scope(&self) -> Scope {
        match () {
            () if self.has("cta") => Scope::Block,
            () if self.has("cluster") => Scope::Cluster,
            () => Scope::Device,
        }
    }
}

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
            "st" => self.store(form, ops)?,
            "atom" | "red" if !form.has("async") => self.atomic(form, ops)?,
            "cvta" => self.cvta(form, ops)?,
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
        let size = type_bytes(kind).unwrap_or(4);
        if size > 8 {
            return self.error("unsupported: loads of 128-bit elements");
        }
        let mut registers = Vec::new();
        let mut bits = 0;
        for element in self.elements(&ops[0]) {
            let (reg, width) = self.destination(element)?;
            bits = bits.max(if reg == NOWHERE { 0 } else { width });
            registers.push(reg);
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
        let size = type_bytes(kind).unwrap_or(4);
        if size > 8 {
            return self.error("unsupported: stores of 128-bit elements");
        }
        let mut registers = Vec::new();
        for element in self.elements(&ops[1]) {
            registers.push(self.source(element, kind)?);
        }
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
        let size = type_bytes(kind).unwrap_or(4);
        if size > 8 {
            return self.error("unsupported: atomic operations on 128 bits");
        }
        let address = self.address(&ops[first])?;
        let mut values = Vec::new();
        for element in self.elements(&ops[first + 1]) {
            values.push(self.source(element, kind)?);
        }
        let count = values.len();
        let mut destinations = vec![NOWHERE; count];
        if returns {
            let elements = self.elements(&ops[0]);
            for (d, element) in destinations.iter_mut().zip(elements) {
                *d = self.destination(element)?.0;
            }
        }
        let new = if update == Update::Swap { self.source(&ops[first + 2], kind)? } else { ZERO };
        let (d, b) = (destinations[0], values[0]);
        values.extend(destinations);
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
                self.push_asynchronous(Asynchronous::MbarrierInit { generic }, NOWHERE, &[address, count]);
            }
            "inval" => {
                let address = self.moved(&ops[0])?;
                self.push_asynchronous(Asynchronous::MbarrierInvalidate { generic }, NOWHERE, &[address]);
            }
            "expect_tx" | "complete_tx" => {
                let (address, bytes) = (self.moved(&ops[0])?, self.source(&ops[1], "u32")?);
                let op = Asynchronous::MbarrierBytes { generic, expect: form.parts[1] == "expect_tx" };
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
                self.push_asynchronous(Asynchronous::MbarrierArrive(arrival), d, &[address, number]);
            }
            "test_wait" | "try_wait" => {
                let (d, _) = self.destination(&ops[0])?;
                let (address, state) = (self.moved(&ops[1])?, self.source(&ops[2], "u64")?);
                let op = Asynchronous::MbarrierTest { generic, parity: form.has("parity") };
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
