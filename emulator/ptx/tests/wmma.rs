//! `wmma`: products of tiles loaded from memory, for each shape, type and order of elements.

mod common;
use common::{Random, bytes, kernel, read_bytes, run, shape};
use half::{bf16, f16};
use phalanx_ptx::{FaultKind, Memory};

/// The bytes of a small whole number in a type, and back.
fn put(kind: &str, x: f32) -> Vec<u8> {
    match kind {
        "f16" => f16::from_f32(x).to_le_bytes().to_vec(),
        "bf16" => bf16::from_f32(x).to_le_bytes().to_vec(),
        "s8" | "u8" => vec![x as i8 as u8],
        "s32" => (x as i32).to_le_bytes().to_vec(),
        _ => x.to_le_bytes().to_vec(),
    }
}

fn get(kind: &str, bytes: &[u8]) -> f32 {
    match kind {
        "f16" => f16::from_le_bytes([bytes[0], bytes[1]]).to_f32(),
        "s32" => i32::from_le_bytes(bytes.try_into().unwrap()) as f32,
        _ => f32::from_le_bytes(bytes.try_into().unwrap()),
    }
}

/// A matrix in memory by rows or by columns, with lines `pitch` elements long.
struct Matrix {
    values: Vec<f32>,
    columns: usize,
    pitch: usize,
    by_rows: bool,
}

impl Matrix {
    fn new(rows: usize, columns: usize, by_rows: bool, random: &mut Random) -> Matrix {
        let values = (0..rows * columns).map(|_| (random.next() % 7) as f32).collect();
        Matrix { values, columns, pitch: (if by_rows { columns } else { rows }) + 16, by_rows }
    }

    fn place(&self, row: usize, column: usize) -> usize {
        if self.by_rows { row * self.pitch + column } else { column * self.pitch + row }
    }

    fn at(&self, row: usize, column: usize) -> f32 {
        self.values[row * self.columns + column]
    }

    fn bytes(&self, kind: &str) -> Vec<u8> {
        let size = put(kind, 0.0).len();
        let mut bytes = vec![0; self.pitch * 48 * size];
        for (n, &x) in self.values.iter().enumerate() {
            let at = self.place(n / self.columns, n % self.columns) * size;
            bytes[at..at + size].copy_from_slice(&put(kind, x));
        }
        bytes
    }

    fn order(&self) -> &'static str {
        if self.by_rows { "row" } else { "col" }
    }
}

fn registers(from: usize, count: usize) -> String {
    format!("{{{}}}", (from..from + count).map(|i| format!("%r{i}")).collect::<Vec<_>>().join(","))
}

/// D = A B + C, for operands of `kind` in so many registers, and sums of `sums`.
fn product([m, n, k]: [usize; 3], kind: &str, sums: &str, counts: [usize; 2], orders: [bool; 4]) {
    let mut random = Random(m as u64 * 7 + k as u64);
    let a = Matrix::new(m, k, orders[0], &mut random);
    let b = Matrix::new(k, n, orders[1], &mut random);
    let c = Matrix::new(m, n, orders[2], &mut random);
    let d = Matrix::new(m, n, orders[3], &mut random);
    let memory = Memory::new(1 << 20);
    let [pa, pb] = [&a, &b].map(|matrix| bytes(&memory, &matrix.bytes(kind)));
    let [pc, pd] = [&c, &d].map(|matrix| bytes(&memory, &matrix.bytes(sums)));
    let four = if sums == "f16" { 4 } else { 8 };
    let (ra, rb) = (registers(10, counts[0]), registers(20, counts[1]));
    let (rc, rd) = (registers(30, four), registers(40, four));
    let shape_ = format!("m{m}n{n}k{k}");
    let kinds = if kind == "f16" { format!("{sums}.{sums}") } else { format!("{sums}.{kind}.{kind}.{sums}") };
    let (oa, ob, oc, od) = (a.order(), b.order(), c.order(), d.order());
    let body = format!(
        "wmma.load.a.sync.aligned.{oa}.{shape_}.global.{kind} {ra}, [%p0], {};
        wmma.load.b.sync.aligned.{ob}.{shape_}.{kind} {rb}, [%p1], {};
        wmma.load.c.sync.aligned.{oc}.{shape_}.global.{sums} {rc}, [%p2], {};
        wmma.mma.sync.aligned.{oa}.{ob}.{shape_}.{kinds} {rd}, {ra}, {rb}, {rc};
        wmma.store.d.sync.aligned.{od}.{shape_}.global.{sums} [%p3], {rd}, {};",
        a.pitch, b.pitch, c.pitch, d.pitch
    );
    run(&kernel(4, &body), &memory, shape(1, 32), &[pa, pb, pc, pd])
        .unwrap_or_else(|f| panic!("{body}: {f}"));
    let size = put(sums, 0.0).len();
    let found = read_bytes(&memory, pd, d.bytes(sums).len());
    for row in 0..m {
        for column in 0..n {
            let wanted = c.at(row, column) + (0..k).map(|i| a.at(row, i) * b.at(i, column)).sum::<f32>();
            let at = d.place(row, column) * size;
            assert_eq!(get(sums, &found[at..at + size]), wanted, "{body} row {row} column {column}");
        }
    }
}

#[test]
fn tiles_are_multiplied_in_every_shape_and_order() {
    for bits in 0..16 {
        let orders = [bits & 1 == 0, bits & 2 == 0, bits & 4 == 0, bits & 8 == 0];
        product([16, 16, 16], "f16", "f32", [8, 8], orders);
    }
    let orders = [true, false, true, true];
    for shape in [[16, 16, 16], [8, 32, 16], [32, 8, 16]] {
        product(shape, "f16", "f16", [8, 8], orders);
        let [a, b] = [shape[0] * 16 / 64, shape[1] * 16 / 64];
        product(shape, "bf16", "f32", [a, b], orders);
        product(shape, "s8", "s32", [a / 2, b / 2], orders);
    }
    product([16, 16, 8], "tf32", "f32", [4, 4], orders);
}

#[test]
fn a_tile_past_the_end_is_found() {
    let memory = Memory::new(1 << 20);
    let a = bytes(&memory, &[0; 16 * 16 * 2 - 2]);
    let body = format!("wmma.load.a.sync.aligned.row.m16n16k16.f16 {}, [%p0];", registers(10, 8));
    let fault = run(&kernel(1, &body), &memory, shape(1, 32), &[a]).unwrap_err();
    assert_eq!((fault.kind, fault.thread), (FaultKind::OutOfBounds, [15, 0, 0]), "{fault}");
}
