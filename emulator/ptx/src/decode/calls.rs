//! Functions: which call themselves, whose addresses are taken; calls, and where parameters and variables lie in a
//! thread's local memory.
//!
//! A function's variables have one place for the whole launch, as its registers have. Only of a function that calls
//! itself, or that allocates on the stack, each call has a frame: the function's first register says where it begins.

use std::collections::{BTreeSet, HashMap};

use super::names::Symbol;
use super::{Builder, aligned};
use crate::ParseError;
use crate::code::{CallSite, Callee, CalleeKind, FRAME_ALIGN, Frame, NOWHERE, Op, Reg, Slot, StackOp, ZERO};
use crate::syntax::{Declaration, Function, Operand, RawInstruction, Statement, SyntaxTree};

/// A module's functions, by number, and how they call each other.
pub(crate) struct CallGraph<'a> {
    names: Vec<&'a str>,
    numbers: HashMap<&'a str, u32>,
    /// `None` for a function that the module only declares.
    functions: Vec<Option<&'a Function>>,
    /// Functions whose address is taken: an indirect call may reach any of them.
    taken: BTreeSet<u32>,
    /// Functions of which each call has a frame.
    framed: Vec<bool>,
}

fn instructions(function: &Function) -> impl Iterator<Item = &RawInstruction> {
    function.body.iter().flatten().filter_map(|statement| match statement {
        Statement::Instruction(raw) => Some(&**raw),
        _ => None,
    })
}

/// The operand of a call that names what is called.
fn target(ops: &[Operand]) -> Option<&str> {
    let called = ops.iter().find(|operand| !matches!(operand, Operand::Group(_)));
    if let Some(Operand::Name(name, 0)) = called { Some(name) } else { None }
}

impl<'a> CallGraph<'a> {
    pub(super) fn new(tree: &'a SyntaxTree) -> CallGraph<'a> {
        let (mut names, mut numbers, mut functions) = (Vec::new(), HashMap::new(), Vec::new());
        for function in &tree.functions {
            let number = *numbers.entry(function.name.as_str()).or_insert(names.len() as u32) as usize;
            if number == names.len() {
                names.push(function.name.as_str());
                functions.push(None);
            }
            if function.body.is_some() {
                functions[number] = Some(function);
            }
        }
        let framed = vec![false; names.len()];
        let mut graph = CallGraph { names, numbers, functions, taken: BTreeSet::new(), framed };
        graph.take_addresses(tree);
        let calls: Vec<BTreeSet<u32>> = graph.functions.iter().map(|f| graph.called_by(*f)).collect();
        for number in 0..graph.names.len() {
            let allocates = |f: &Function| instructions(f).any(|raw| raw.parts[0] == "alloca");
            graph.framed[number] =
                graph.functions[number].is_some_and(allocates) || reaches(&calls, number as u32);
        }
        graph
    }

    pub(super) fn names(&self) -> Vec<String> {
        self.names.iter().map(|name| name.to_string()).collect()
    }

    pub(super) fn number(&self, name: &str) -> Option<u32> {
        self.numbers.get(name).copied()
    }

    fn take_addresses(&mut self, tree: &SyntaxTree) {
        let initial = tree.variables.iter().flat_map(|v| &v.addresses).map(|part| part.name.as_str());
        let bodies = tree.functions.iter().flat_map(instructions).filter(|raw| raw.parts[0] != "call");
        let operands = bodies.flat_map(|raw| &raw.operands).filter_map(|operand| match operand {
            Operand::Name(name, _) => Some(name.as_str()),
            _ => None,
        });
        self.taken = initial.chain(operands).filter_map(|name| self.number(name)).collect();
    }

    fn called_by(&self, function: Option<&Function>) -> BTreeSet<u32> {
        let calls = function.into_iter().flat_map(instructions).filter(|raw| raw.parts[0] == "call");
        let mut called = BTreeSet::new();
        for name in calls.filter_map(|raw| target(&raw.operands)) {
            match self.number(name) {
                Some(number) => _ = called.insert(number),
                None => called.extend(&self.taken),
            }
        }
        called
    }
}

/// Whether calls lead from a function to itself.
fn reaches(calls: &[BTreeSet<u32>], function: u32) -> bool {
    let (mut seen, mut next) = (BTreeSet::new(), vec![function]);
    while let Some(at) = next.pop() {
        for &called in &calls[at as usize] {
            if called == function {
                return true;
            }
            if seen.insert(called) {
                next.push(called);
            }
        }
    }
    false
}

impl<'a> Builder<'a> {
    /// The number of a function in the program; one that is met for the first time will be decoded.
    fn callee(&mut self, name: &str) -> u32 {
        if let Some(&number) = self.functions.get(name) {
            return number;
        }
        let number = self.program.callees.len() as u32;
        let kind = match name {
            "vprintf" => CalleeKind::Print,
            "__assertfail" => CalleeKind::Assert,
            "malloc" => CalleeKind::Allocate,
            "free" => CalleeKind::Free,
            _ => CalleeKind::Missing,
        };
        let (parameters, returns) = (Vec::new(), Vec::new());
        self.program.callees.push(Callee { name: name.into(), kind, parameters, returns, frame: None });
        self.functions.insert(name.into(), number);
        if let Some(at) = self.graph.number(name) {
            let places = &mut self.program.functions;
            places.resize(places.len().max(self.graph.names.len()), NOWHERE);
            places[at as usize] = number;
            if let Some(function) = self.graph.functions[at as usize].filter(|f| !f.entry) {
                self.waiting.push((number, function));
            }
        }
        number
    }

    /// Decodes a function that is called.
    pub(super) fn function(&mut self, number: u32, function: &'a Function) -> Result<(), ParseError> {
        self.names.function();
        let first = self.program.registers;
        let framed = self.graph.number(&function.name).is_some_and(|n| self.graph.framed[n as usize]);
        let frame = if framed { self.fresh() } else { ZERO };
        (self.frame, self.frame_bytes, self.frame_align) = (frame, 0, FRAME_ALIGN);
        let place = |builder: &mut Builder, list: &[Declaration]| -> Vec<Slot> {
            list.iter().map(|parameter| builder.local(parameter)).collect()
        };
        let returns = place(self, &function.returns);
        let parameters = place(self, &function.parameters);
        let kind = CalleeKind::Code(self.program.code.len() as u32);
        let name = function.name.clone();
        self.program.callees[number as usize] = Callee { name, kind, parameters, returns, frame: None };
        self.body(function)?;
        if framed {
            self.program.stacked = true;
            // A frame without bytes would let calls go on for ever.
            let bytes = aligned(self.frame_bytes.max(1), FRAME_ALIGN);
            let (align, registers) = (self.frame_align, (first, self.program.registers));
            let frame = Frame { register: frame, bytes, align, registers };
            self.program.callees[number as usize].frame = Some(frame);
        }
        Ok(())
    }

    /// Gives a variable or parameter of the function that is being decoded its place.
    pub(super) fn local(&mut self, d: &Declaration) -> Slot {
        let end = if self.frame == ZERO { &mut self.program.local_bytes } else { &mut self.frame_bytes };
        self.frame_align = self.frame_align.max(d.align);
        let offset = aligned(*end, d.align);
        *end = offset + d.bytes as u32;
        let slot = Slot { frame: self.frame, offset, bytes: d.bytes as u32 };
        self.names.add(&d.name, Symbol::Local(slot));
        slot
    }

    /// The register that holds a function's address.
    pub(super) fn function_register(&mut self, name: &str) -> Option<Reg> {
        let number = self.graph.number(name)?;
        Some(self.constant(crate::code::function_address(number as usize)))
    }

    /// `call (result), function, (arguments), prototype`
    pub(super) fn call(&mut self, ops: &[Operand]) -> Result<(), ParseError> {
        let mut rest = ops;
        let mut results = Vec::new();
        if let [Operand::Group(names), more @ ..] = rest {
            results = self.slots(names)?;
            rest = more;
        }
        let [Operand::Name(name, 0), more @ ..] = rest else { return self.error("a function wanted") };
        let arguments = match more {
            [Operand::Group(names), ..] => self.slots(names)?,
            _ => Vec::new(),
        };
        let (callee, target) = match self.names.find(name) {
            Some(Symbol::Register(reg, _)) => (None, reg),
            _ => (Some(self.callee(name)), ZERO),
        };
        if callee.is_none() {
            let graph = self.graph;
            for &number in &graph.taken {
                self.callee(graph.names[number as usize]);
            }
        }
        let number = self.program.calls.len() as u32;
        self.program.calls.push(CallSite { callee, arguments, results });
        self.push(Op::Call(number), ZERO, &[target]);
        Ok(())
    }

    /// Where the parameters of a call lie.
    fn slots(&mut self, names: &[Operand]) -> Result<Vec<Slot>, ParseError> {
        let mut slots = Vec::new();
        for name in names {
            let Operand::Name(name, 0) = name else { return self.error("a parameter's name wanted") };
            match self.names.find(name) {
                Some(Symbol::Local(slot)) => slots.push(slot),
                _ => return self.error(&format!("no parameter `{name}`")),
            }
        }
        Ok(slots)
    }

    /// `alloca.u64 d, bytes, align`, `stacksave.u64 d`, `stackrestore.u64 a`
    pub(super) fn stack(&mut self, name: &str, ops: &[Operand]) -> Result<(), ParseError> {
        self.want(ops, 1, 3)?;
        self.program.stacked = true;
        if name == "stackrestore" {
            let a = self.source(&ops[0], "u64")?;
            self.push(Op::Stack(StackOp::Restore), NOWHERE, &[a]);
            return Ok(());
        }
        let (d, _) = self.destination(&ops[0])?;
        if name == "stacksave" {
            self.push(Op::Stack(StackOp::Save), d, &[]);
            return Ok(());
        }
        let [_, bytes, align @ ..] = ops else { return self.error("a size wanted") };
        let bytes = self.source(bytes, "u64")?;
        let align = match align.first() {
            Some(align) => self.source(align, "u32")?,
            None => self.constant(8),
        };
        self.push(Op::Stack(StackOp::Allocate), d, &[bytes, align]);
        Ok(())
    }
}
