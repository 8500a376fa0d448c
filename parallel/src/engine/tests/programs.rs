//! Random programs of plain tensor code: in a scope of any engine they leave the bits that a serial run leaves.

use phalanx_kernels::{add, add_scaled_, matmul, matmul_into, relu, scale_, sub, tanh};
use phalanx_tensor::{DType, Tensor};

use super::super::{Cause, scope};
use super::*;

const PROGRAMS: u64 = 10_000;
const SIZE: usize = 3;

/// splitmix64.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let x = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((x ^ (x >> 31)) % bound as u64) as usize
    }
}

/// What an operation computes, and of which tensors: from `a` and `b` into `c`, which is neither.
#[derive(Clone, Copy)]
struct Template {
    kind: usize,
    a: usize,
    b: usize,
    c: usize,
}

/// A step of a program.
enum Step {
    /// Pushes the operation of this number.
    Push(usize),
    /// Plain code between the pushes.
    Plain(Template),
}

struct Program {
    dtype: DType,
    tensors: usize,
    operations: Vec<Template>,
    steps: Vec<Step>,
}

impl Program {
    fn new(seed: u64) -> Program {
        let random = &mut Random(seed);
        let tensors = 3 + random.below(4);
        let template = |random: &mut Random| {
            let c = random.below(tensors);
            let mut other = || (c + 1 + random.below(tensors - 1)) % tensors;
            let (a, b) = (other(), other());
            Template { kind: random.below(7), a, b, c }
        };
        let operations: Vec<_> = (0..2 + random.below(5)).map(|_| template(random)).collect();
        let step = |random: &mut Random| match random.below(8) {
            0 => Step::Plain(template(random)),
            _ => Step::Push(random.below(operations.len())),
        };
        let steps = (0..6 + random.below(20)).map(|_| step(random)).collect();
        let dtype = if seed.is_multiple_of(2) { DType::F32 } else { DType::F64 };
        Program { dtype, tensors, operations, steps }
    }

    /// The tensors before the first step.
    fn tensors(&self) -> Vec<Tensor> {
        let tensor = |n: usize| {
            let values: Vec<f64> =
                (0..SIZE * SIZE).map(|i| ((n * 31 + i * 17) % 23) as f64 / 11.5 - 1.0).collect();
            let narrow: Vec<f32> = values.iter().map(|&x| x as f32).collect();
            match self.dtype {
                DType::F32 => Tensor::from_slice(&narrow, &[SIZE, SIZE], Device::CPU),
                _ => Tensor::from_slice(&values, &[SIZE, SIZE], Device::CPU),
            }
        };
        (0..self.tensors).map(|n| tensor(n).unwrap()).collect()
    }
}

impl Template {
    fn work(self, tensors: &[Tensor]) -> impl FnMut() -> Result<(), Cause> + Send + 'static {
        let [a, b, mut c] = [self.a, self.b, self.c].map(|at| tensors[at].clone());
        move || {
            match self.kind {
                0 => c.copy_from(&sub(&a, &b)?)?,
                1 => c.copy_from(&tanh(&add(&matmul(&a, &b)?, &c)?)?)?,
                2 => matmul_into(&mut c, &a, &b)?,
                3 => add_scaled_(&mut c, &a, -0.5)?,
                4 => scale_(&mut c, 0.75)?,
                // Views: rows of one into rows of the other, and a transposed one.
                5 => c.narrow(0, 1, 2)?.copy_from(&a.narrow(0, 0, 2)?)?,
                _ => c.copy_from(&relu(&sub(&a.transpose(0, 1)?, &b)?)?)?,
            }
            Ok(())
        }
    }
}

fn bits(tensors: &[Tensor]) -> Vec<Vec<u8>> {
    tensors.iter().map(|tensor| tensor.to_bytes().unwrap()).collect()
}

#[test]
fn random_programs_of_plain_tensor_code_equal_a_serial_run() {
    let engines: Vec<_> = engines().into_iter().map(|(name, engine)| (name, Arc::new(engine))).collect();
    for seed in 0..PROGRAMS {
        let program = Program::new(seed);
        let (serial, scoped) = (program.tensors(), program.tensors());
        let mut operations: Vec<_> = program.operations.iter().map(|op| op.work(&serial)).collect();
        for step in &program.steps {
            match step {
                Step::Push(at) => operations[*at]().unwrap(),
                Step::Plain(template) => template.work(&serial)().unwrap(),
            }
        }
        let (name, engine) = &engines[seed as usize % engines.len()];
        let lanes = [Lane::Device(Device::CPU), Lane::Device(Device::Cpu(1)), Lane::Priority];
        let outcome = scope(engine, |scope| {
            let operation = |(at, template): (usize, &Template)| {
                let op = Op::new("step").on(lanes[at % 3]).priority(at as i32 % 2);
                scope.operation(op, template.work(&scoped))
            };
            let operations: Vec<_> = program.operations.iter().enumerate().map(operation).collect();
            for step in &program.steps {
                match step {
                    Step::Push(at) => scope.push(&operations[*at]).unwrap(),
                    Step::Plain(template) => template.work(&scoped)().unwrap(),
                }
            }
        });
        outcome.unwrap();
        assert_eq!(bits(&scoped), bits(&serial), "program {seed} on {name}");
    }
}
