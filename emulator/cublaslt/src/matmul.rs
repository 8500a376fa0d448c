//! A product in stream order. The call tells the driver which memory the product touches; the product reads and writes
//! it when its stream has come to it.
//!
//! Alpha and beta are on the host, where the call reads them, or in device memory, where the product reads them when it
//! runs.

use std::iter::zip;

use phalanx_emulator_link::driver::{Access, Driver, Progress};
use phalanx_emulator_link::pointer::Host;

use crate::description::{Activation, Bias, gelu, gelu_derivative};
use crate::element::{ElementType, InputRounding, Number};
use crate::layout::Layout;
use crate::plan::Plan;
use crate::product::product;
use crate::status::{Result, Status, present};

/// Alpha or beta.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Scale {
    Known(f64),
    OnDevice { address: u64, kind: ElementType },
}

impl Scale {
    pub(crate) fn new(at: Host, kind: ElementType, on_device: bool, name: &str) -> Result<Scale> {
        if on_device {
            let address = present((!at.is_null()).then_some(at.address() as u64), name)?;
            return Ok(Scale::OnDevice { address, kind });
        }
        let value = match kind {
            ElementType::F64 => at.get::<f64>(),
            _ => at.get::<f32>().map(f64::from),
        };
        Ok(Scale::Known(present(value, name)?))
    }

    /// The value, when the product runs.
    pub(crate) fn value(self, driver: &Driver) -> std::result::Result<f64, i32> {
        let (address, kind) = match self {
            Scale::Known(value) => return Ok(value),
            Scale::OnDevice { address, kind } => (address, kind),
        };
        let mut bytes = [0; 8];
        driver.read(address, &mut bytes[..kind.bytes()])?;
        let [a, b, c, d, ..] = bytes;
        Ok(if kind == ElementType::F64 {
            f64::from_le_bytes(bytes)
        } else {
            f64::from(f32::from_le_bytes([a, b, c, d]))
        })
    }

    pub(crate) fn access(self) -> Option<Access> {
        match self {
            Scale::Known(_) => None,
            Scale::OnDevice { address, kind } => {
                Some(Access { address, bytes: kind.bytes() as u64, written: 0 })
            }
        }
    }
}

/// Ranges of one matrix that the driver is told of, for its search for missing waits.
const RANGES_MAX: usize = 256;

/// What a workspace is filled with: bytes that are no number in any floating-point type.
const SPOILT: u8 = 0xff;

/// A product that is queued, with everything it needs.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Matmul {
    pub plan: Plan,
    pub alpha: Scale,
    pub beta: Scale,
    pub a: u64,
    pub b: u64,
    pub c: u64,
    pub d: u64,
    /// Where the workspace is, and its bytes.
    pub workspace: (u64, u64),
    /// How many chains of additions k is cut into.
    pub chains: usize,
}

/// A value, or the driver's status of an access that went wrong and what the access was for.
type DriverResult<T> = std::result::Result<T, (i32, String)>;

fn ranges(layout: &Layout, address: u64, written: bool) -> impl Iterator<Item = Access> {
    let at = move |(offset, bytes): (i64, usize)| Access {
        address: address.wrapping_add_signed(offset),
        bytes: bytes as u64,
        written: u32::from(written),
    };
    layout.ranges(RANGES_MAX).into_iter().map(at)
}

/// The bytes of one matrix of a batch.
fn read(driver: &Driver, name: &str, layout: &Layout, address: u64, batch: usize) -> DriverResult<Vec<u8>> {
    let mut bytes = vec![0; layout.bytes()];
    let status = driver.read(address.wrapping_add_signed(layout.offset(batch)), &mut bytes);
    status.map_err(|status| (status, format!("{name} is not where it is said to be")))?;
    Ok(bytes)
}

/// Writes the elements of one matrix of a batch, and nothing between its columns.
fn write(
    driver: &Driver,
    name: &str,
    layout: &Layout,
    address: u64,
    batch: usize,
    bytes: &[u8],
) -> DriverResult<()> {
    let one = Layout { batches: 1, ..*layout };
    for (offset, length) in one.ranges(usize::MAX) {
        let to = address.wrapping_add_signed(layout.offset(batch) + offset);
        let status = driver.write(to, &bytes[offset as usize..][..length]);
        status.map_err(|status| (status, format!("{name} is not where it is said to be")))?;
    }
    Ok(())
}

impl Matmul {
    fn accesses(&self) -> Vec<Access> {
        let Plan { description, a, b, c, d, .. } = &self.plan;
        let mut all: Vec<Access> = [self.alpha, self.beta].into_iter().filter_map(Scale::access).collect();
        all.extend(ranges(a, self.a, false));
        all.extend(ranges(b, self.b, false));
        if self.beta != Scale::Known(0.0) {
            all.extend(ranges(c, self.c, false));
        }
        all.extend(ranges(d, self.d, true));
        let epilogue = description.epilogue;
        if epilogue.bias != Bias::None {
            all.extend(ranges(&self.plan.bias(), description.bias, epilogue.bias != Bias::Added));
        }
        let (address, bytes) = self.workspace;
        if bytes > 0 {
            all.push(Access { address, bytes, written: 1 });
        }
        if epilogue.uses_aux() {
            all.extend(ranges(&self.plan.aux(), description.aux, epilogue.keeps_input));
        }
        all
    }

    /// Bytes read and written if each operand is moved once. The workspace is left out: it stays in the cache.
    fn traffic(&self) -> (u64, u64) {
        let Plan { description, a, b, c, d, .. } = &self.plan;
        let bytes = |layout: &Layout| {
            (layout.rows * layout.columns * layout.batches.max(1) * layout.kind.bytes()) as u64
        };
        let epilogue = description.epilogue;
        let (mut read, mut written) = (bytes(a) + bytes(b), bytes(d));
        if self.beta != Scale::Known(0.0) {
            read += bytes(c);
        }
        match epilogue.bias {
            Bias::None => {}
            Bias::Added => read += bytes(&self.plan.bias()),
            _ => written += bytes(&self.plan.bias()),
        }
        match (epilogue.uses_aux(), epilogue.keeps_input) {
            (true, true) => written += bytes(&self.plan.aux()),
            (true, false) => read += bytes(&self.plan.aux()),
            _ => {}
        }
        (read, written)
    }

    /// The product in the driver's log: the type of its inputs, its sizes, and its epilogue where it has one.
    fn name(&self) -> String {
        let Plan { description, a, d, m, n, k, .. } = &self.plan;
        let mut name = format!("product {:?} {m}x{n}x{k}", a.kind).to_lowercase();
        if d.batches > 1 {
            name += &format!(" batches {}", d.batches);
        }
        let epilogue = description.epilogue;
        if epilogue.activation != Activation::None {
            name += &format!(" {:?}", epilogue.activation).to_lowercase();
        }
        if epilogue.bias != Bias::None {
            name += &format!(" bias {:?}", epilogue.bias).to_lowercase();
        }
        if self.beta != Scale::Known(0.0) {
            name += " accumulated";
        }
        name
    }

    fn run<T: Number>(&self, driver: &Driver) -> DriverResult<()> {
        let scale = |scale: Scale| scale.value(driver).map_err(|status| (status, "alpha or beta".into()));
        let (alpha, beta) = (scale(self.alpha)?, scale(self.beta)?);
        let (workspace, bytes) = self.workspace;
        if bytes > 0 {
            let status = driver.write(workspace, &vec![SPOILT; bytes as usize]);
            status.map_err(|status| (status, "the workspace is not where it is said to be".into()))?;
        }
        (0..self.plan.d.batches).try_for_each(|batch| self.run_one::<T>(driver, batch, alpha, beta))
    }

    fn run_one<T: Number>(&self, driver: &Driver, batch: usize, alpha: f64, beta: f64) -> DriverResult<()> {
        let Plan { description, a, b, c, d, m, n, k } = &self.plan;
        let (left, right) = (read(driver, "A", a, self.a, batch)?, read(driver, "B", b, self.b, batch)?);
        let element = |layout: &Layout, transposed: bool| {
            let (row, column) = layout.strides();
            if transposed { (column, row) } else { (row, column) }
        };
        let (a_row, a_column) = element(a, description.transposed[0]);
        let (b_row, b_column) = element(b, description.transposed[1]);
        let inputs = description.inputs;
        let op_a = |i: usize, p: usize| T::load(a.kind, inputs, &left, i * a_row + p * a_column);
        let op_b = |p: usize, j: usize| T::load(b.kind, inputs, &right, p * b_row + j * b_column);
        let chain = |i: usize| {
            let (from, to) = (i * k / self.chains, (i + 1) * k / self.chains);
            product(*m, *n, to - from, &|i, p| op_a(i, from + p), &|p, j| op_b(from + p, j))
        };
        let mut z = chain(0);
        for further in 1..self.chains {
            zip(&mut z, chain(further)).for_each(|(z, sum)| *z = T::from_f64(1.0).plain(*z, sum));
        }
        let before = if beta == 0.0 { Vec::new() } else { read(driver, "C", c, self.c, batch)? };
        let (c_row, c_column) = c.strides();
        let (alpha, beta) = (T::from_f64(alpha), T::from_f64(beta));
        for (at, z) in z.iter_mut().enumerate() {
            let (i, j) = (at % m, at / m);
            let scaled = alpha.plain(*z, T::default());
            let c = |bytes: &[u8]| T::load(c.kind, InputRounding::AsTheyAre, bytes, i * c_row + j * c_column);
            *z = if before.is_empty() { scaled } else { beta.plain(c(&before), scaled) };
        }
        self.finish(driver, batch, &mut z)?;
        let sums = match description.epilogue.bias {
            Bias::GradientOfA => sums(*m, *k, &op_a),
            Bias::GradientOfB => sums(*n, *k, &|j, p| op_b(p, j)),
            Bias::GradientOfD => sums(*m, *n, &|i, j| z[j * m + i]),
            Bias::None | Bias::Added => Vec::new(),
        };
        if !sums.is_empty() {
            self.put(driver, "the bias gradient", &self.plan.bias(), description.bias, batch, &sums)?;
        }
        self.put(driver, "D", d, self.d, batch, &z)
    }

    /// Bias and activation.
    fn finish<T: Number>(&self, driver: &Driver, batch: usize, z: &mut [T]) -> DriverResult<()> {
        let Plan { description, m, .. } = &self.plan;
        let epilogue = description.epilogue;
        if epilogue.bias == Bias::Added {
            let layout = self.plan.bias();
            let bias = read(driver, "the bias", &layout, description.bias, batch)?;
            for (at, z) in z.iter_mut().enumerate() {
                *z =
                    T::from_f64(1.0).plain(*z, T::load(layout.kind, InputRounding::AsTheyAre, &bias, at % m));
            }
        }
        if epilogue.keeps_input {
            self.put(driver, "aux", &self.plan.aux(), description.aux, batch, z)?;
        }
        match epilogue.activation {
            Activation::None => {}
            Activation::Relu => z.iter_mut().for_each(|z| *z = T::from_f64(z.to_f64().max(0.0))),
            Activation::Gelu => z.iter_mut().for_each(|z| *z = T::from_f64(gelu(z.to_f64()))),
            Activation::GeluGradient => {
                let layout = self.plan.aux();
                let aux = read(driver, "aux", &layout, description.aux, batch)?;
                for (at, z) in z.iter_mut().enumerate() {
                    let (i, j) = (at % m, at / m);
                    let input = T::load(layout.kind, InputRounding::AsTheyAre, &aux, j * layout.leading + i);
                    *z = T::from_f64(z.to_f64() * gelu_derivative(input.to_f64()));
                }
            }
        }
        Ok(())
    }

    /// Writes values that lie by columns into a matrix.
    fn put<T: Number>(
        &self,
        driver: &Driver,
        name: &str,
        layout: &Layout,
        address: u64,
        batch: usize,
        values: &[T],
    ) -> DriverResult<()> {
        let (row, column) = layout.strides();
        let mut bytes = vec![0; layout.bytes()];
        for (at, value) in values.iter().enumerate() {
            let (i, j) = (at % layout.rows, at / layout.rows);
            value.store(layout.kind, &mut bytes, i * row + j * column);
        }
        write(driver, name, layout, address, batch, &bytes)
    }
}

/// The sums over `length` elements each.
fn sums<T: Number>(count: usize, length: usize, element: &dyn Fn(usize, usize) -> T) -> Vec<T> {
    let one = T::from_f64(1.0);
    (0..count).map(|i| (0..length).fold(T::default(), |sum, p| element(i, p).plain(one, sum))).collect()
}

/// The address of a matrix, which must not be null.
pub(crate) fn address(pointer: Host, name: &str) -> Result<u64> {
    present((!pointer.is_null()).then_some(pointer.address() as u64), name)
}

/// Queues a product on a stream.
pub(crate) fn submit(matmul: Matmul, stream: usize) -> Result<()> {
    let driver = Driver::loaded().map_err(|why| Status::NOT_INITIALIZED.because(why))?;
    let Plan { description, m, n, k, d, .. } = &matmul.plan;
    let what = match d.batches {
        1 => format!("a cublasLt product of {m} x {n} x {k}"),
        batches => format!("{batches} cublasLt products of {m} x {n} x {k}"),
    };
    let double = description.double;
    let (read, written) = matmul.traffic();
    let flops = 2 * (*m as u64) * (*n as u64) * (*k as u64) * d.batches as u64;
    driver.note(&matmul.name(), read, written, flops);
    let run = move |_| {
        if driver.is_dry() {
            return Progress::Done;
        }
        let done = if double { matmul.run::<f64>(driver) } else { matmul.run::<f32>(driver) };
        done.map_or_else(|(status, why)| Progress::Failed(status, why), |()| Progress::Done)
    };
    let queued = driver.submit(stream, &what, &matmul.accesses(), run);
    queued.map_err(|status| Status::EXECUTION_FAILED.because(format!("the driver refuses it with {status}")))
}
