//! [`SaveOnCpu`]: saved values are kept in the host's memory between their forward and their backward pass.
//!
//! ```text
//! forward    op 1 ─ save x ─── op 2 ─ save y ───                 backward   ── use y ── op 2' ── use x ── op 1' ──
//!                     └─copy to the host   └─copy                     copy back─┘     copy back─┘
//! ```
//! On a GPU the copies run on streams of their own. A value's memory on the device is free as soon as its copy is done. When backward
//! takes a value, the values that were saved before it are copied back already.
//!
//! A storage is copied once, however many operations save it or views of it, and copied back once.
//! Source: PyTorch's `torch.autograd.graph.save_on_cpu`.

use std::any::Any;
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::{Arc, Mutex, Weak};

use phalanx_tensor::{
    Category, CopyStream, DType, Device, Dims, PendingCopy, Tensor, contiguous_strides, unpoisoned,
};

use crate::graph::saved_variable::{SavedHooks, SavedHooksGuard, saved_hooks};
use crate::{Result, is_recomputing};

/// Values below this size stay where they are: a copy takes longer than they are worth.
const BYTES_MIN: usize = 1 << 16;
/// Copies to the host that may be under way. The host waits for the oldest before it starts another, so that a GPU's memory does not
/// fill with values that wait for their copies.
const IN_FLIGHT: usize = 2;
/// Storages that are copied back before backward asks for them.
const AHEAD: u64 = 2;

/// Saves values on the host, on this device, until the guard is dropped: [`SaveOnCpu`] with its defaults.
///
/// ```
/// use phalanx_autograd::{Var, save_on_cpu, tensor::{Device, DType, Tensor}};
/// let x = Var::leaf(Tensor::zeros(&[1 << 16], DType::F32, Device::CPU)?)?;
/// let y = {
///     let _saved = save_on_cpu(Device::Cpu(1));
///     x.exp()?.exp()?
/// };
/// y.sum_all()?.backward()?;
/// # Ok::<(), phalanx_autograd::Error>(())
/// ```
pub fn save_on_cpu(host: Device) -> SavedHooksGuard {
    saved_hooks(Arc::new(SaveOnCpu::new(host)))
}

/// [`SavedHooks`] that keep activations on another device, usually a CPU device: large ones that a forward pass saves. Parameters, data
/// and what backward computes again stay on their device.
#[derive(Debug)]
pub struct SaveOnCpu {
    host: Device,
    bytes_min: usize,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// The storages on the host.
    copies: HashMap<Key, Weak<Offloaded>>,
    /// The same in the order in which they were saved.
    order: BTreeMap<u64, Weak<Offloaded>>,
    next: u64,
    /// The copies to the host that were started last.
    started: VecDeque<Weak<Offloaded>>,
    streams: HashMap<Device, Arc<Streams>>,
}

/// What identifies copied elements: the storage and its version, the elements' type, and the view if they are a part of the storage.
type Key = ((u64, u64), u64, DType, Option<View>);

/// Shape, strides and offset.
type View = (Dims, Dims, usize);

/// The copies between one device and the host.
#[derive(Debug)]
struct Streams {
    down: CopyStream,
    up: CopyStream,
}

/// The elements of a storage, or of a part of one, in the host's memory.
#[derive(Debug)]
struct Offloaded {
    number: u64,
    streams: Arc<Streams>,
    copies: Mutex<Copies>,
}

#[derive(Debug)]
struct Copies {
    host: Copied,
    device: Option<Copied>,
    /// How many saved values it stands for, and how many of them backward has taken since it was last copied back.
    saved: usize,
    taken: usize,
}

#[derive(Debug)]
enum Copied {
    Here(Tensor),
    Coming(PendingCopy),
    /// A copy has failed.
    Lost,
}

impl Copied {
    /// The tensor, after its copy.
    fn tensor(&mut self) -> Result<Tensor> {
        *self = match std::mem::replace(self, Copied::Lost) {
            Copied::Coming(copy) => Copied::Here(copy.wait()?),
            other => other,
        };
        match self {
            Copied::Here(tensor) => Ok(tensor.clone()),
            _ => Err(crate::Error::Custom("save_on_cpu: an earlier copy of this value has failed".into())),
        }
    }
}

/// A saved value.
enum Packed {
    Kept(Tensor),
    Offloaded(Arc<Offloaded>, View),
}

impl SaveOnCpu {
    /// Keeps values of 64 KiB and more on `host`.
    pub fn new(host: Device) -> SaveOnCpu {
        SaveOnCpu { host, bytes_min: BYTES_MIN, state: Mutex::default() }
    }

    /// Keeps values of storages of so many bytes and more.
    #[must_use]
    pub fn with_bytes_min(self, bytes_min: usize) -> SaveOnCpu {
        SaveOnCpu { bytes_min, ..self }
    }

    fn stays(&self, tensor: &Tensor) -> bool {
        let storage = tensor.storage();
        tensor.device() == self.host
            || storage.bytes() < self.bytes_min.max(1)
            || storage.category() != Category::Activations
            || is_recomputing()
    }

    /// The copy of `elements`, which are a view of the tensor's storage, and are computed where there is no copy.
    fn offload(
        &self,
        tensor: &Tensor,
        part: Option<View>,
        elements: impl FnOnce() -> phalanx_tensor::Result<Tensor>,
    ) -> Result<Arc<Offloaded>> {
        let key = (tensor.storage().identity(), tensor.version(), tensor.dtype(), part);
        let state = &mut *unpoisoned(self.state.lock());
        if let Some(known) = state.copies.get(&key).and_then(Weak::upgrade) {
            unpoisoned(known.copies.lock()).saved += 1;
            return Ok(known);
        }
        while state.started.len() >= IN_FLIGHT {
            if let Some(oldest) = state.started.pop_front().and_then(|oldest| oldest.upgrade()) {
                unpoisoned(oldest.copies.lock()).host.tensor()?;
            }
        }
        let streams = state.streams(tensor.device(), self.host)?;
        let host = Copied::Coming(streams.down.start(&elements()?)?);
        let copies = Mutex::new(Copies { host, device: None, saved: 1, taken: 0 });
        let copy = Arc::new(Offloaded { number: state.next, streams, copies });
        state.next += 1;
        state.forget_freed();
        state.copies.insert(key, Arc::downgrade(&copy));
        state.order.insert(copy.number, Arc::downgrade(&copy));
        state.started.push_back(Arc::downgrade(&copy));
        Ok(copy)
    }

    /// Starts to copy back what was saved before `copy`.
    fn prefetch(&self, copy: &Offloaded) -> Result<()> {
        let before = copy.number.saturating_sub(AHEAD)..copy.number;
        let before: Vec<_> = unpoisoned(self.state.lock())
            .order
            .range(before)
            .rev()
            .filter_map(|(_, c)| c.upgrade())
            .collect();
        before.iter().try_for_each(|copy| copy.start_back())
    }
}

impl State {
    fn streams(&mut self, device: Device, host: Device) -> Result<Arc<Streams>> {
        if let Some(known) = self.streams.get(&device) {
            return Ok(known.clone());
        }
        let new = Streams { down: CopyStream::new(device, host)?, up: CopyStream::new(host, device)? };
        Ok(self.streams.entry(device).or_insert(Arc::new(new)).clone())
    }

    /// At every 64th copy: drops the entries of those that are gone.
    fn forget_freed(&mut self) {
        if self.next.is_multiple_of(64) {
            self.copies.retain(|_, copy| copy.strong_count() > 0);
            self.order.retain(|_, copy| copy.strong_count() > 0);
        }
    }
}

impl Offloaded {
    /// Starts to copy it back beside other work; without a GPU there is nothing to gain.
    fn start_back(&self) -> Result<()> {
        let mut copies = unpoisoned(self.copies.lock());
        if copies.device.is_none() && self.streams.up.is_asynchronous() {
            let host = copies.host.tensor()?;
            copies.device = Some(Copied::Coming(self.streams.up.start(&host)?));
        }
        Ok(())
    }

    /// The elements on their device, for one of the saved values. They are dropped there when the last has taken them.
    fn take(&self) -> Result<Tensor> {
        let copies = &mut *unpoisoned(self.copies.lock());
        let mut device = match copies.device.take() {
            Some(device) => device,
            None => Copied::Coming(self.streams.up.start(&copies.host.tensor()?)?),
        };
        let tensor = device.tensor()?;
        copies.taken += 1;
        if copies.taken < copies.saved {
            copies.device = Some(device);
        } else {
            copies.taken = 0;
        }
        Ok(tensor)
    }
}

impl SavedHooks for SaveOnCpu {
    fn pack(&self, tensor: &Tensor) -> Result<Box<dyn Any + Send + Sync>> {
        if self.stays(tensor) {
            return Ok(Box::new(Packed::Kept(tensor.clone())));
        }
        let (held, size) = (tensor.storage().bytes() / tensor.dtype().size(), tensor.dtype().size());
        // Of a small part of a storage the rest is not worth a copy.
        let view = (Dims::from_slice(tensor.shape()), Dims::from_slice(tensor.strides()), tensor.offset());
        let packed = if tensor.numel() * 4 >= held {
            let copy = self.offload(tensor, None, || tensor.as_strided(&[held], &[1], 0))?;
            Packed::Offloaded(copy, view)
        } else if tensor.numel() * size >= self.bytes_min {
            let copy = self.offload(tensor, Some(view.clone()), || tensor.copy())?;
            Packed::Offloaded(copy, (view.0, contiguous_strides(tensor.shape()), 0))
        } else {
            Packed::Kept(tensor.copy()?)
        };
        Ok(Box::new(packed))
    }

    fn unpack(&self, packed: &(dyn Any + Send + Sync)) -> Result<Tensor> {
        match packed.downcast_ref::<Packed>() {
            Some(Packed::Kept(tensor)) => Ok(tensor.clone()),
            Some(Packed::Offloaded(copy, (shape, strides, offset))) => {
                let elements = copy.take()?;
                self.prefetch(copy)?;
                Ok(elements.as_strided(shape, strides, *offset)?)
            }
            None => Err(crate::Error::Custom("save_on_cpu: got a value that other hooks have packed".into())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Options, Var, backward};

    /// Elements of a value: 128 KiB.
    const N: usize = 1 << 14;
    const BYTES: usize = N * 8;

    fn leaf(device: Device) -> Var {
        let values: Vec<f64> = (0..N).map(|i| (i % 97) as f64 / 97.0 - 0.4).collect();
        Var::leaf(Tensor::from_slice(&values, &[N], device).unwrap().tagged(Category::Parameters)).unwrap()
    }

    fn activations(device: Device) -> phalanx_tensor::Usage {
        device.ledger().unwrap().category(Category::Activations)
    }

    /// Bytes of activations after the forward pass of a chain, the most in both passes, and the gradient.
    fn chain(x: &Var, length: usize, host: Option<Device>) -> ([usize; 2], Option<Vec<f64>>) {
        let ledger = x.device().ledger().unwrap();
        ledger.reset_peak();
        let saved = host.map(save_on_cpu);
        let y = (0..length).try_fold(x.clone(), |x, _| x.tanh()).unwrap();
        drop(saved);
        let forward = activations(x.device()).now;
        y.sum_all().unwrap().backward().unwrap();
        drop(y);
        let grad = x.grad().unwrap().into_tensor();
        x.as_leaf().unwrap().set_grad(None);
        ([forward, activations(x.device()).peak], (!x.device().is_meta()).then(|| grad.to_vec().unwrap()))
    }

    #[test]
    fn a_chain_keeps_one_value_on_its_device_and_all_on_the_host() {
        for [device, host] in [[Device::Cpu(70), Device::Cpu(71)], [Device::Meta(70), Device::Meta(71)]] {
            let x = leaf(device);
            let ([kept, _], wanted) = chain(&x, 9, None);
            assert_eq!(kept, 9 * BYTES);
            let (short, _) = chain(&x, 5, Some(host));
            let (long, got) = chain(&x, 9, Some(host));
            // The result; in backward that, a value, two gradients and the loss.
            assert_eq!([long, short], [[BYTES, 4 * BYTES + 8]; 2]);
            assert_eq!(got, wanted);
            assert_eq!((activations(host).now, activations(host).peak), (0, 9 * BYTES), "{host}");
        }
    }

    #[test]
    fn a_storage_is_copied_once_for_all_that_save_it_or_views_of_it() {
        let (device, host) = (Device::Cpu(72), Device::Cpu(73));
        let x = leaf(device);
        let run = |saved: bool| {
            let _saved = saved.then(|| save_on_cpu(host));
            let y = x.exp().unwrap();
            let square = y.mul(&y).unwrap();
            let matrix = y.reshape(&[128, 128]).unwrap();
            let product = matrix.mul(&matrix.transpose(0, 1).unwrap()).unwrap();
            square.sum_all().unwrap().add(&product.sum_all().unwrap()).unwrap()
        };
        let grad = |loss: Var| {
            loss.backward().unwrap();
            let grad = x.grad().unwrap().tensor().to_vec::<f64>().unwrap();
            x.as_leaf().unwrap().set_grad(None);
            grad
        };
        let wanted = grad(run(false));
        let loss = run(true);
        assert_eq!(activations(host).now, BYTES);
        assert_eq!(grad(loss), wanted);
        assert_eq!(activations(host).now, 0);
    }

    #[test]
    fn parameters_and_small_values_stay_and_a_small_part_takes_no_more_than_itself() {
        let (device, host) = (Device::Cpu(74), Device::Cpu(75));
        let x = leaf(device);
        let ones = Tensor::from_slice(&[1.0; N], &[N], device).unwrap();
        let constant = Var::new(ones.tagged(Category::Parameters));
        let _saved = saved_hooks(Arc::new(SaveOnCpu::new(host).with_bytes_min(1024)));
        let weighted = x.mul(&constant).unwrap();
        assert_eq!(activations(host).now, 0, "a parameter that is a constant here");
        let part = x.exp().unwrap().narrow(0, 0, N / 8).unwrap();
        let before = activations(host).now;
        let square = part.mul(&part).unwrap();
        assert_eq!(activations(host).now - before, BYTES / 8);
        drop((weighted, part, square));
        let few = x.narrow(0, 0, 8).unwrap().exp().unwrap();
        assert_eq!(activations(host).now, 0, "64 bytes");
        drop(few);
    }

    #[test]
    fn a_value_that_is_written_later_is_used_as_it_was_and_passes_may_be_repeated() {
        let (device, host) = (Device::Cpu(76), Device::Cpu(77));
        let x = leaf(device);
        let y = {
            let _saved = save_on_cpu(host);
            x.exp().unwrap()
        };
        let wanted = y.tensor().to_vec::<f64>().unwrap();
        crate::kernels::scale_(&mut y.tensor().clone(), 3.0).unwrap();
        let loss = y.sum_all().unwrap();
        for times in [1.0, 2.0] {
            backward(&[(loss.clone(), None)], Options { retain_graph: true, ..Options::default() }).unwrap();
            let grad = x.grad().unwrap().tensor().to_vec::<f64>().unwrap();
            assert!(grad.iter().zip(&wanted).all(|(got, wanted)| *got == times * wanted));
        }
        assert_eq!(activations(device).now, BYTES + 8, "only the values that the test holds, and the loss");
    }
}
