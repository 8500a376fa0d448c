//! Branches, calls, and the ends of threads.

use super::Builder;
use super::form::Form;
use super::names::Symbol;
use crate::ParseError;
use crate::code::{Call, Callee, CalleeKind, Op, ZERO};
use crate::syntax::{Operand, Statement};

impl Builder<'_> {
    /// Decodes an instruction of this family, if it is one.
    pub(super) fn control(&mut self, form: &Form, ops: &[Operand]) -> Result<bool, ParseError> {
        let op = match form.name() {
            "bra" => return self.branch(ops).map(|()| true),
            "brx" => return self.indexed(ops).map(|()| true),
            "call" => return self.call(ops).map(|()| true),
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

    /// The number of a function; one that is met for the first time will be decoded.
    pub(super) fn callee(&mut self, name: &str) -> Result<u32, ParseError> {
        if let Some(&number) = self.functions.get(name) {
            return Ok(number);
        }
        let number = self.program.callees.len() as u32;
        let kind = match name {
            "vprintf" => CalleeKind::Print,
            "__assertfail" => CalleeKind::Assert,
            _ => CalleeKind::Missing,
        };
        let callee = Callee { name: name.into(), kind, parameters: Vec::new(), returns: Vec::new() };
        self.program.callees.push(callee);
        self.functions.insert(name.into(), number);
        let function = self.source.functions.iter().find(|f| f.name == name && f.body.is_some());
        if let Some(function) = function {
            if reaches(self.source, name, name, &mut Vec::new()) {
                return self.error(&format!("unsupported: `{name}` calls itself"));
            }
            self.waiting.push((number, function));
        }
        Ok(number)
    }

    /// `call (result), function, (arguments), prototype`
    fn call(&mut self, ops: &[Operand]) -> Result<(), ParseError> {
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
            _ => (Some(self.callee(name)?), ZERO),
        };
        let number = self.program.calls.len() as u32;
        self.program.calls.push(Call { callee, arguments, results });
        self.push(Op::Call(number), ZERO, &[target]);
        Ok(())
    }

    /// Where the parameters of a call lie in local memory. Their sizes are those of the function, so zero stands for them here.
    fn slots(&mut self, names: &[Operand]) -> Result<Vec<(u32, u32)>, ParseError> {
        let mut slots = Vec::new();
        for name in names {
            let Operand::Name(name, 0) = name else { return self.error("a parameter's name wanted") };
            match self.names.find(name) {
                Some(Symbol::Local(offset)) => slots.push((offset, 0)),
                _ => return self.error(&format!("no parameter `{name}`")),
            }
        }
        Ok(slots)
    }
}

/// Whether calls lead from one function to another.
fn reaches(source: &crate::syntax::Source, from: &str, to: &str, seen: &mut Vec<String>) -> bool {
    let Some(function) = source.functions.iter().find(|f| f.name == from && f.body.is_some()) else {
        return false;
    };
    for statement in function.body.iter().flatten() {
        let Statement::Instruction(spelled) = statement else { continue };
        if spelled.parts[0] != "call" {
            continue;
        }
        for operand in &spelled.operands {
            let Operand::Name(name, 0) = operand else { continue };
            if name == to {
                return true;
            }
            if !seen.contains(name) {
                seen.push(name.clone());
                if reaches(source, name, to, seen) {
                    return true;
                }
            }
        }
    }
    false
}
