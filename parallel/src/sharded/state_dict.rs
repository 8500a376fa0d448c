//! State dicts of a sharded model: the whole model's, gathered on rank 0; this rank's parts, by which any layout reads any
//! other; and the optimizer's, as if it trained whole parameters. Each with the way back.

use std::collections::HashMap;
use std::ops::Range;

use phalanx_kernels as kernels;
use phalanx_kernels::optim::optim_state_dtype;
use phalanx_nn::autograd::Int8Blocks;
use phalanx_nn::{Mismatch, Parameter, is_whole_state};
use phalanx_tensor::{DType, Device, Tensor};

use super::core::Place;
use super::flat_parameter::{FlatParameter, Ranks};
use super::zero::EntryStorage;
use super::{FullStateDict, Zero};
use crate::all_gather::all_gather_object;
use crate::comm::{Call, Reduction};
use crate::data_parallel::Entries;
use crate::sharded_tensor::ShardedTensor;
use crate::{Error, Result, sharded_tensor};

impl Zero {
    /// Every parameter and buffer by name, as [`phalanx_nn::state_dict`] of a whole model, copied to the CPU; parameters in
    /// the dtype that shards are kept in. On rank 0; elsewhere nothing. All ranks call it. One unit of parameters is gathered
    /// at a time.
    ///
    /// # Errors
    /// If memory is short, or as [`crate::comm::Pending::wait`].
    pub fn full_state_dict(&self) -> Result<Entries> {
        self.full_state_dict_with(FullStateDict::default())
    }

    /// [`Zero::full_state_dict`], on every rank or on the parameters' device.
    ///
    /// # Errors
    /// As [`Zero::full_state_dict`].
    pub fn full_state_dict_with(&self, to: FullStateDict) -> Result<Entries> {
        let (state, here) = (self.core.lock(), self.gets(to));
        let mut found: HashMap<Place, Tensor> = HashMap::new();
        for (u, unit) in state.units.iter().enumerate() {
            for (f, flat) in unit.flats.iter().enumerate() {
                let whole = flat.whole(&self.core.ranks)?;
                if !here {
                    continue;
                }
                let whole = to.place(&whole)?;
                for (m, member) in flat.members.iter().enumerate() {
                    found.insert(Place { unit: u, flat: f, member: m }, member.of(&whole)?);
                }
            }
        }
        let entry = |(path, source): &(String, EntryStorage)| -> Result<Option<(String, Tensor)>> {
            let tensor = match source {
                EntryStorage::Sharded(place) => found.get(place).cloned(),
                EntryStorage::Int8(parameter, places) => {
                    let whole = places.map(|place| found.get(&place).cloned());
                    match (parameter.int8_blocks(), whole) {
                        (Some(blocks), [Some(codes), Some(scales)]) => {
                            let scales = kernels::cast(&scales, blocks.tensors()[1].dtype())?;
                            Some(blocks.with_tensors([codes, scales])?.values()?)
                        }
                        _ => None,
                    }
                }
                EntryStorage::Parameter(p) => Some(to.copy(&p.values()?)?),
                EntryStorage::Buffer(b) => Some(to.copy(&b.tensor())?),
            };
            Ok(tensor.map(|tensor| (path.clone(), tensor)))
        };
        let entries = self.entries.iter().filter(|_| here);
        entries.filter_map(|named| entry(named).transpose()).collect()
    }

    /// Whether this rank gets a whole state.
    fn gets(&self, to: FullStateDict) -> bool {
        !to.rank0_only || self.core.ranks.all.rank() == 0
    }

    /// Takes parameters and buffers from a state dict of the whole model, which every rank has; converts dtypes.
    ///
    /// # Errors
    /// If names are missing, not known or of another shape; then nothing is changed.
    pub fn load_full_state_dict(&self, entries: Entries) -> Result<()> {
        let mut given: HashMap<String, Tensor> = entries.into_iter().collect();
        let (mut problems, mut fitting) = (Mismatch::default(), Vec::new());
        {
            let mut state = self.core.lock();
            for (path, source) in &self.entries {
                let shape = match source {
                    EntryStorage::Sharded(place) => state.flat(place).members[place.member].shape.to_vec(),
                    EntryStorage::Parameter(p) | EntryStorage::Int8(p, _) => p.tensor().shape().to_vec(),
                    EntryStorage::Buffer(b) => b.tensor().shape().to_vec(),
                };
                match given.remove(path) {
                    None => problems.missing.push(path.clone()),
                    Some(t) if t.shape() != shape => {
                        problems.misshaped.push((path.clone(), t.shape().into(), shape[..].into()));
                    }
                    Some(t) => fitting.push((source, t)),
                }
            }
            problems.unexpected = given.into_keys().collect();
            problems.unexpected.sort();
            problems.check("state dict")?;
            for (source, values) in fitting {
                match source {
                    EntryStorage::Sharded(place) => state.flat(place).load(place.member, &values)?,
                    EntryStorage::Int8(parameter, places) => {
                        let blocks = Int8Blocks::new(&kernels::cast(&values, parameter.dtype())?)?;
                        for (place, held) in places.iter().zip(blocks.tensors()) {
                            state.flat(place).load(place.member, held)?;
                        }
                    }
                    EntryStorage::Parameter(p) => p.load(&values)?,
                    EntryStorage::Buffer(b) => b.load(&values)?,
                }
            }
        }
        self.core.updated(true)
    }
}

impl FullStateDict {
    /// Where a state is kept; on the CPU only if there are values.
    fn place(self, tensor: &Tensor) -> Result<Tensor> {
        let stays = !self.offload_to_cpu || tensor.device().is_meta();
        Ok(tensor.to_device(if stays { tensor.device() } else { Device::CPU }, false)?)
    }

    /// The same there, in a storage of its own.
    fn copy(self, tensor: &Tensor) -> Result<Tensor> {
        let copy = self.place(tensor)?;
        if copy.shares_storage(tensor) { Ok(copy.copy()?) } else { Ok(copy) }
    }
}

impl Zero {
    /// This rank's part of every parameter, in the dtype that shards are kept in, by the parameter's name (with `.codes` and `.scales`
    /// behind it if it is in 8-bit blocks), and every tensor that is not spread, such as buffers by their paths. The tensors are the model's own, not copies. Nothing is sent.
    ///
    /// # Errors
    /// Never for tensors that are contiguous, as a model's are.
    pub fn sharded_state_dict(&self) -> Result<Vec<ShardedTensor>> {
        let mut state = self.core.lock();
        let mut own = |place: &Place, whole: Option<ShardedTensor>| {
            let flat = state.flat(place);
            let (range, values) = flat.own_elements(place.member)?;
            let of_parameter = || ShardedTensor::of_parameter(&flat.members[place.member].parameter);
            Ok::<_, Error>(ShardedTensor { range, values, ..whole.unwrap_or_else(of_parameter) })
        };
        let mut parts: Vec<ShardedTensor> = Vec::new();
        for (path, source) in &self.entries {
            let found = match source {
                EntryStorage::Sharded(place) => vec![own(place, None)?],
                EntryStorage::Int8(p, places) => {
                    let whole = ShardedTensor::held_in(p)?;
                    places
                        .iter()
                        .zip(whole)
                        .map(|(place, whole)| own(place, Some(whole)))
                        .collect::<Result<_>>()?
                }
                EntryStorage::Parameter(p) => ShardedTensor::held_in(p)?,
                EntryStorage::Buffer(b) => vec![ShardedTensor::of_buffer(path, b)],
            };
            for part in found {
                if !parts.iter().any(|known| known.name == part.name) {
                    parts.push(part);
                }
            }
        }
        Ok(parts)
    }

    /// Takes this rank's values from parts of any layout's state dict, usually those of all its ranks; converts dtypes. All
    /// ranks call it.
    ///
    /// # Errors
    /// If parts of this rank's tensors are missing, or names are not known or of another size; then nothing is changed.
    pub fn load_sharded_state_dict(&self, parts: &[ShardedTensor]) -> Result<()> {
        sharded_tensor::load("sharded state dict", &self.sharded_state_dict()?, parts, true)?;
        self.core.updated(true)
    }
}

impl Zero {
    /// An optimizer's state as if it trained whole parameters, on the CPU: the [`Optimizer::state_dict`] that one device
    /// would have, in the order of the buffers. `kinds`: the tensors that its rule keeps of a parameter
    /// ([`phalanx_nn::Rule::state`]). On rank 0; elsewhere nothing. All ranks call it.
    ///
    /// It is the same for every layout: shards that are kept wider than the dtype of the computation
    /// ([`ZeroConfig::shard_dtype`](super::ZeroConfig)) are in it as the master copies that one device would have.
    ///
    /// # Errors
    /// If the optimizer is not one of [`Zero::parameters`], or as [`crate::comm::Pending::wait`].
    ///
    /// [`Optimizer::state_dict`]: phalanx_nn::Optimizer::state_dict
    pub fn full_optimizer_state(&self, own: Entries, kinds: &[&'static str]) -> Result<Entries> {
        self.full_optimizer_state_with(own, kinds, FullStateDict::default())
    }

    /// [`Zero::full_optimizer_state`], on every rank or on the parameters' device; numbers of steps are on the CPU.
    ///
    /// # Errors
    /// As [`Zero::full_optimizer_state`].
    pub fn full_optimizer_state_with(
        &self,
        own: Entries,
        kinds: &[&'static str],
        to: FullStateDict,
    ) -> Result<Entries> {
        let (state, here) = (self.core.lock(), self.gets(to));
        let is_ignored = |(entry, _): &&(String, Tensor)| {
            let parameter = entry.rsplit_once('.').map(|(name, _)| name);
            self.ignored.iter().any(|p| Some(p.name()) == parameter)
        };
        let of_ignored = own.iter().filter(|_| here).filter(is_ignored);
        let mut whole =
            of_ignored.map(|(name, t)| Ok((name.clone(), to.copy(t)?))).collect::<Result<Entries>>()?;
        let own: HashMap<String, Tensor> = own.into_iter().collect();
        for flat in state.units.iter().flat_map(|unit| &unit.flats).filter(|f| f.trained) {
            let steps = self.steps(flat, &own)?;
            let dtype = optim_state_dtype(flat.shard_dtype());
            let mut kinds = kinds.to_vec();
            kinds.extend(flat.has_master().then_some("master"));
            let shards: HashMap<&str, Tensor> = flat.pieces.iter().map(|p| (p.name(), p.tensor())).collect();
            for (m, (member, step)) in flat.members.iter().zip(steps).enumerate() {
                let name = member.parameter.name();
                if here {
                    whole.push((format!("{name}.step"), Tensor::scalar(step, Device::CPU)?));
                }
                for kind in &kinds {
                    let own = match *kind == "master" && flat.shard_is_master() {
                        true => shards.get(name),
                        false => own.get(&format!("{name}.{kind}")),
                    };
                    let gathered = self.gather_member(flat, m, kind, own, dtype)?;
                    if let Some(tensor) = gathered.filter(|_| here) {
                        let tensor = to.place(&tensor)?;
                        whole.push((format!("{name}.{kind}"), tensor));
                    }
                }
            }
        }
        Ok(whole)
    }

    /// The number of steps of each of a buffer's parameters.
    fn steps(&self, flat: &FlatParameter, own: &HashMap<String, Tensor>) -> Result<Vec<i64>> {
        let step = |name: &str| own.get(&format!("{name}.step")).filter(|t| !t.device().is_meta());
        let steps = flat.members.iter().map(|m| step(m.parameter.name()).map_or(Ok(0), Tensor::item::<i64>));
        let steps = steps.collect::<phalanx_tensor::Result<Vec<i64>>>()?;
        let mut steps = Tensor::from_slice(&steps, &[steps.len()], flat.device().host())?;
        if self.core.ranks.all.has_peers() {
            self.core.ranks.shard.all_reduce(&mut steps, Reduction::Max)?;
        }
        Ok(steps.to_vec()?)
    }

    /// One kind of state of one parameter, whole, on every rank.
    fn gather_member(
        &self,
        flat: &FlatParameter,
        m: usize,
        kind: &str,
        own: Option<&Tensor>,
        dtype: DType,
    ) -> Result<Option<Tensor>> {
        let (member, comm) = (&flat.members[m], &self.core.ranks.shard);
        if is_whole_state(kind) {
            return self.whole_state(own);
        }
        let inside = |rank: usize| member.inside(&flat.cuts.range(rank)).map_or(0, |part| part.len());
        let counts: Vec<usize> = (0..comm.size()).map(inside).collect();
        let device = flat.device();
        let own = match own {
            Some(own) => own.to_device(device, false)?,
            None if counts[comm.rank()] == 0 => Tensor::empty(&[0], dtype, device)?,
            None => return Err(Error::Config("the optimizer does not train `Zero::parameters`".into())),
        };
        let all = Tensor::empty(&[counts.iter().sum()], dtype, device)?;
        comm.run(Call::all_gather_uneven(all.clone(), own, &counts))?;
        Ok(Some(all.with_shape(&member.shape)?))
    }

    /// State of a whole parameter, on every rank: from the first rank that has it, since all have the same.
    fn whole_state(&self, own: Option<&Tensor>) -> Result<Option<Tensor>> {
        let own = own
            .map(|own| FullStateDict::default().place(own))
            .transpose()?
            .filter(|tensor| !tensor.device().is_meta());
        // As bits, since numbers as text may be rounded.
        let bits = |tensor: Tensor| -> Result<(Vec<usize>, bool, Vec<u64>)> {
            let values = kernels::cast(&tensor, DType::F64)?.to_vec::<f64>()?;
            let bits = values.into_iter().map(f64::to_bits).collect();
            Ok((tensor.shape().to_vec(), tensor.dtype() == DType::F64, bits))
        };
        let told = own.map(bits).transpose()?;
        let all = match self.core.ranks.all.has_peers() {
            true => all_gather_object(&self.core.ranks.shard, &told)?,
            false => vec![told],
        };
        let Some((shape, wide, bits)) = all.into_iter().flatten().next() else { return Ok(None) };
        let values = bits.into_iter().map(f64::from_bits).collect();
        let tensor = Tensor::from_vec(values, &shape, Device::CPU)?;
        Ok(Some(kernels::cast(&tensor, if wide { DType::F64 } else { DType::F32 })?))
    }

    /// This rank's part of an optimizer's state of whole parameters, for [`phalanx_nn::Optimizer::load_state_dict`].
    /// Where shards are kept wider than the dtype of the computation, they become the master copies in it. All ranks call it with
    /// the same, after [`Zero::load_full_state_dict`].
    ///
    /// # Errors
    /// If a tensor is not of its parameter's shape, or as [`crate::comm::Pending::wait`].
    pub fn part_of_optimizer_state(&self, whole: Entries) -> Result<Entries> {
        let part = self.own_part(whole)?;
        if self.core.lock().units.iter().flat_map(|unit| &unit.flats).any(FlatParameter::shard_is_master) {
            self.core.updated(false)?;
        }
        Ok(part)
    }

    fn own_part(&self, whole: Entries) -> Result<Entries> {
        let mut state = self.core.lock();
        let mut flats: Vec<&mut FlatParameter> =
            state.units.iter_mut().flat_map(|unit| &mut unit.flats).filter(|f| f.trained).collect();
        let places = flats.iter().enumerate().flat_map(|(f, flat)| {
            flat.members
                .iter()
                .enumerate()
                .map(move |(m, member)| (member.parameter.name().to_string(), (f, m)))
        });
        let places: HashMap<String, (usize, usize)> = places.collect();
        let mut part = Entries::new();
        for (name, tensor) in whole {
            let split = name.rsplit_once('.').and_then(|(name, kind)| Some((*places.get(name)?, kind)));
            let Some(((f, m), kind)) = split else {
                part.push((name, tensor));
                continue;
            };
            let (flat, rank) = (&mut *flats[f], self.core.ranks.shard.rank());
            let member = &flat.members[m];
            let inside = member.inside(&flat.cuts.range(rank));
            if kind == "step" || is_whole_state(kind) {
                part.extend(inside.map(|_| (name, tensor)));
                continue;
            }
            if tensor.shape() != &member.shape[..] {
                let (got, wanted) = (tensor.shape(), &member.shape);
                return Err(Error::Config(format!(
                    "optimizer state: {name}: got shape {got:?}, wanted {wanted:?}"
                )));
            }
            if kind == "master" && flat.shard_is_master() {
                flat.load(m, &tensor)?;
            } else if let Some(inside) = inside {
                let all = tensor.with_shape(&[member.range.len()])?;
                part.push((name, all.narrow(0, inside.start, inside.len())?));
            }
        }
        Ok(part)
    }
}

impl Zero {
    /// This rank's parts of an optimizer's state (its [`Optimizer::state_dict`]) by name, as [`Zero::sharded_state_dict`] has those of
    /// the parameters. The tensors are the optimizer's own. Nothing is sent.
    ///
    /// [`Optimizer::state_dict`]: phalanx_nn::Optimizer::state_dict
    pub fn sharded_optimizer_state(&self, own: &Entries) -> Vec<ShardedTensor> {
        let mut parts =
            ShardedTensor::of_optimizer_state(&[self.parameters(), self.ignored.clone()].concat(), own);
        let state = self.core.lock();
        let flats = state.units.iter().flat_map(|unit| &unit.flats);
        let masters = flats.filter(|flat| flat.shard_is_master()).flat_map(|flat| &flat.pieces);
        parts.extend(masters.map(|piece| {
            let part = ShardedTensor::of_parameter(piece);
            ShardedTensor { name: format!("{}.master", part.name), ..part }
        }));
        parts
    }

    /// Puts this rank's values, from parts of any layout's state, usually those of all its ranks, into the state `own` of an optimizer;
    /// [`phalanx_nn::Optimizer::load_state_dict`] takes the result. All ranks call it, after [`Zero::load_sharded_state_dict`].
    ///
    /// # Errors
    /// If parts of this rank's tensors are missing or of another size, or are of parameters that are not known.
    pub fn part_of_sharded_optimizer_state(&self, own: Entries, parts: &[ShardedTensor]) -> Result<Entries> {
        let what = "sharded optimizer state";
        let is_of =
            |entry: &str, p: &Parameter| entry.rsplit_once('.').is_some_and(|(name, _)| name == p.name());
        let all = || self.core.parameters().chain(&self.ignored);
        let mut unexpected: Vec<String> = parts.iter().map(|part| part.name.clone()).collect();
        unexpected.retain(|entry| !all().any(|p| is_of(entry, p)));
        Mismatch { unexpected, ..Mismatch::default() }.check(what)?;
        sharded_tensor::load(what, &self.sharded_optimizer_state(&own), parts, false)?;
        if self.core.lock().units.iter().flat_map(|unit| &unit.flats).any(FlatParameter::shard_is_master) {
            self.core.updated(false)?;
        }
        Ok(own)
    }
}

/// For state dicts.
impl FlatParameter {
    /// All values in the shards' dtype, for a state dict, on the parameters' device.
    pub(super) fn whole(&self, ranks: &Ranks) -> Result<Tensor> {
        let all = Tensor::empty(&[self.elements()], self.shard.dtype(), self.device)?;
        let own = self.shard.to_device(self.device, false)?;
        ranks.shard.run(Call::all_gather_uneven(all.clone(), own, &self.cuts.counts()))?;
        Ok(all)
    }

    /// This rank's elements of a member, and their values.
    pub(super) fn own_elements(&self, member: usize) -> Result<(Range<usize>, Tensor)> {
        let member = &self.members[member];
        let inside = member.inside(&self.own).unwrap_or(0..0);
        let start = (member.range.start + inside.start).saturating_sub(self.own.start);
        Ok((inside.clone(), self.shard.narrow(0, start.min(self.own.len()), inside.len())?))
    }

    /// Loads this rank's elements of a member from a tensor of all its elements.
    pub(super) fn load(&mut self, member: usize, values: &Tensor) -> Result<()> {
        let (own, mut shard) = self.own_elements(member)?;
        let values = values.with_shape(&[values.numel()])?.narrow(0, own.start, own.len())?;
        let values = kernels::cast(&values.to_device(shard.device(), false)?, shard.dtype())?;
        Ok(kernels::copy_(&mut shard, &values)?)
    }
}
