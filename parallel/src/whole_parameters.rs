//! [`WholeParameters`]: how ranks that have parts of a parameter get the update of a rule that depends on the whole parameter
//! ([`phalanx_nn::WholeRule`]: Muon, LAMB, Adafactor).
//!
//! ```text
//! w, cut by two ranks of tensor parallelism and each part by two of ZeRO       owner: rank 1
//!
//! ranks 0 1 2 3    each has a range of a box: BoxRange     ──all-to-all──►   rank 1 copies ranges into boxes, boxes into w
//!                  each gets its elements of the update    ◄─all-to-all──    and computes the update of w
//! ```
//!
//! Each cut parameter has one owner, the rank with the fewest elements so far of those that have a part of it. So the work is spread
//! over the ranks, and one exchange in each direction serves all parameters. [`plan`] is a pure function of what all ranks hold.

use std::collections::{BTreeMap, HashMap};

use phalanx_kernels as kernels;
use phalanx_kernels::optim::optim_state_dtype;
use phalanx_nn::{Parameter, Peers, Shard, WholeExchange};
use phalanx_tensor::{DType, Device, Dims, Tensor, Window};
use serde::{Deserialize, Serialize};

use crate::all_gather::all_gather_object;
use crate::comm::{Call, Comm};
use crate::sharded_tensor::{BoxRange, ShardedTensor, covers};
use crate::{Error, Result};

/// The ranks that have the parameters of one stage of a model, for [`phalanx_nn::Optimizer::with_peers`]. Data-parallel wrappers make
/// them ([`DataParallel::peers`](crate::data_parallel::DataParallel::peers)).
pub struct WholeParameters {
    comm: Comm,
    device: Device,
}

impl WholeParameters {
    /// The ranks of a group, which send tensors from `device`.
    pub fn new(comm: Comm, device: Device) -> WholeParameters {
        WholeParameters { comm, device }
    }
}

impl Peers for WholeParameters {
    fn exchange(&self, parameters: &[Parameter]) -> phalanx_nn::Result<Box<dyn WholeExchange>> {
        Ok(Box::new(Exchange::new(self.comm.clone(), self.device, parameters).map_err(nn_error)?))
    }
}

/// As an error of the optimizer that has asked.
fn nn_error(error: Error) -> phalanx_nn::Error {
    match error {
        Error::Nn(error) => error,
        other => phalanx_nn::autograd::Error::from(other).into(),
    }
}

/// The part of a parameter that a rank has.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct HeldPart {
    name: String,
    place: BoxRange,
    /// Whether its state is f64; else it is f32.
    wide: bool,
}

impl HeldPart {
    fn of(parameter: &Parameter) -> Result<HeldPart> {
        let part = ShardedTensor::of_parameter(parameter);
        let wide = optim_state_dtype(parameter.dtype()) == DType::F64;
        Ok(HeldPart { place: part.place()?, name: part.name, wide })
    }
}

/// A parameter of which a rank has only a part.
#[derive(Debug, PartialEq)]
struct CutParameter {
    name: String,
    dtype: DType,
    owner: usize,
    /// The parts, in order of the ranks.
    parts: Vec<RankPart>,
}

#[derive(Debug, PartialEq)]
struct RankPart {
    rank: usize,
    place: BoxRange,
    /// Whether the rank is the first that has this part, which it sends then.
    sends: bool,
}

/// The cut parameters in order of their names, of what each rank holds.
fn plan(held: &[Vec<HeldPart>]) -> Result<Vec<CutParameter>> {
    let mut by_name: BTreeMap<&str, Vec<(usize, &HeldPart)>> = BTreeMap::new();
    for (rank, part) in
        held.iter().enumerate().flat_map(|(rank, own)| own.iter().map(move |part| (rank, part)))
    {
        by_name.entry(&part.name).or_default().push((rank, part));
    }
    by_name.retain(|_, parts| parts.iter().any(|(_, part)| part.place.elements() != part.place.whole()));
    let mut order: Vec<_> = by_name.iter().map(|(name, parts)| (parts[0].1.place.whole(), *name)).collect();
    // The largest first, so that the loads become as equal as they can.
    order.sort_by(|a, b| b.0.cmp(&a.0).then(a.1.cmp(b.1)));
    let (mut loads, mut owners) = (vec![0; held.len()], HashMap::new());
    for (elements, name) in order {
        let holders = by_name[name].iter().map(|(rank, _)| *rank);
        let owner = holders.min_by_key(|&rank| (loads[rank], rank)).unwrap_or(0);
        loads[owner] += elements;
        owners.insert(name, owner);
    }
    by_name.into_iter().map(|(name, parts)| cut_parameter(name, owners[name], &parts)).collect()
}

fn cut_parameter(name: &str, owner: usize, held: &[(usize, &HeldPart)]) -> Result<CutParameter> {
    let mut parts: Vec<RankPart> = Vec::new();
    for &(rank, HeldPart { place, .. }) in held {
        let known = |part: &RankPart| part.place.offset == place.offset && part.place.range == place.range;
        let sends = !parts.iter().any(known);
        parts.push(RankPart { rank, place: place.clone(), sends });
    }
    let first = held[0].1;
    let shape = first.place.shape.clone();
    let whole = BoxRange {
        offset: vec![0; shape.len()],
        extent: shape.clone(),
        range: 0..first.place.whole(),
        shape,
    };
    let all = parts.iter().filter(|part| part.sends).flat_map(|part| part.place.overlaps(&whole));
    if held.iter().any(|(_, part)| part.place.shape != whole.shape || part.wide != first.wide) {
        return Err(Error::Config(format!("{name}: ranks have parts of tensors of unlike shapes or dtypes")));
    }
    if !covers(whole.elements(), all) {
        let why = "the ranks that were given do not have all its elements together";
        return Err(Error::Config(format!("{name}: {why}")));
    }
    let dtype = if first.wide { DType::F64 } else { DType::F32 };
    Ok(CutParameter { name: name.into(), dtype, owner, parts })
}

/// The exchange of one optimizer.
struct Exchange {
    comm: Comm,
    device: Device,
    cut: Vec<CutParameter>,
    /// Of each parameter of this rank, its number among the cut ones.
    numbers: Vec<Option<usize>>,
    /// Of each cut parameter, its index on this rank and the device there.
    here: Vec<Option<(usize, Device)>>,
}

impl Exchange {
    fn new(comm: Comm, device: Device, parameters: &[Parameter]) -> Result<Exchange> {
        let own = parameters.iter().map(HeldPart::of).collect::<Result<Vec<_>>>()?;
        let cut = if comm.size() == 1 || comm.has_peers() {
            plan(&all_gather_object(&comm, &own)?)?
        } else if let Some(part) = own.iter().find(|part| part.place.elements() != part.place.whole()) {
            let why = "its rule needs whole parameters, and ranks on meta have no peers to get the rest from: let a rank own it whole \
                       (`Ownership::Whole`)";
            return Err(Error::Config(format!("{}: {why}", part.name)));
        } else {
            Vec::new()
        };
        let number = |p: &Parameter| cut.iter().position(|cut| cut.name == p.name());
        let numbers: Vec<Option<usize>> = parameters.iter().map(number).collect();
        let mut here = vec![None; cut.len()];
        for (index, number) in numbers.iter().enumerate() {
            number.iter().for_each(|&number| here[number] = Some((index, parameters[index].device())));
        }
        Ok(Exchange { comm, device, cut, numbers, here })
    }

    /// The cut parameters of a dtype with their numbers.
    fn of_dtype(&self, dtype: DType) -> impl Iterator<Item = (usize, &CutParameter)> {
        self.cut.iter().enumerate().filter(move |(_, cut)| cut.dtype == dtype)
    }

    /// The dtypes that are exchanged, each by itself.
    fn dtypes(&self) -> impl Iterator<Item = DType> {
        [DType::F32, DType::F64].into_iter().filter(|&dtype| self.of_dtype(dtype).next().is_some())
    }

    /// Sends `tensors[rank]` to each rank, and returns the `wanted[rank]` elements from each.
    fn all_to_all(&self, dtype: DType, tensors: &[Vec<Tensor>], wanted: &[usize]) -> Result<Vec<Tensor>> {
        let sent: Vec<usize> = tensors.iter().map(|to| to.iter().map(Tensor::numel).sum()).collect();
        let moved = tensors
            .iter()
            .flatten()
            .map(|t| Ok(t.to_device(self.device, false)?.contiguous()?.with_shape(&[t.numel()])?));
        let moved = moved.collect::<Result<Vec<Tensor>>>()?;
        let input = match moved.is_empty() {
            true => Tensor::empty(&[0], dtype, self.device)?,
            false => kernels::cat(&moved.iter().collect::<Vec<_>>(), 0)?,
        };
        let output = Tensor::empty(&[wanted.iter().sum()], dtype, self.device)?;
        self.comm.run(Call::all_to_all_uneven(output.clone(), wanted, input, &sent))?;
        let mut start = 0;
        let mut next = |&count: &usize| {
            start += count;
            Ok(output.narrow(0, start - count, count)?)
        };
        wanted.iter().map(&mut next).collect()
    }

    fn collect(&self, each: usize, parts: &[Vec<Tensor>]) -> Result<Vec<(usize, Vec<Tensor>)>> {
        let (mut found, me) = (Vec::new(), self.comm.rank());
        for dtype in self.dtypes() {
            let (mut sent, mut wanted) = (vec![Vec::new(); self.comm.size()], vec![0; self.comm.size()]);
            for (number, cut) in self.of_dtype(dtype) {
                for part in cut.parts.iter().filter(|part| part.sends) {
                    if part.rank == me {
                        sent[cut.owner].extend(self.own_parts(number, part, each, parts)?);
                    }
                    if cut.owner == me {
                        wanted[part.rank] += each * part.place.elements();
                    }
                }
            }
            let mut received = self.all_to_all(dtype, &sent, &wanted)?;
            for (number, cut) in self.of_dtype(dtype).filter(|(_, cut)| cut.owner == me) {
                let whole = assemble(cut, each, self.device, &mut received)?;
                if let Some((index, device)) = self.here[number] {
                    let whole = whole.into_iter().map(|whole| Ok(whole.to_device(device, false)?));
                    found.push((index, whole.collect::<Result<_>>()?));
                }
            }
        }
        Ok(found)
    }

    /// This rank's tensors for a cut parameter; zeros if it has no gradient.
    fn own_parts(
        &self,
        number: usize,
        part: &RankPart,
        each: usize,
        parts: &[Vec<Tensor>],
    ) -> Result<Vec<Tensor>> {
        let given =
            self.here[number].and_then(|(index, _)| parts.get(index)).filter(|parts| parts.len() == each);
        let zeros = || Ok(Tensor::zeros(&[part.place.elements()], self.cut[number].dtype, self.device)?);
        given.map_or_else(|| (0..each).map(|_| zeros()).collect(), |given| Ok(given.clone()))
    }

    fn distribute(
        &self,
        number: bool,
        decided: Vec<(usize, Tensor)>,
        state: &mut [Vec<Tensor>],
    ) -> Result<Vec<(usize, Tensor)>> {
        let (mut found, me) = (Vec::new(), self.comm.rank());
        let decided: HashMap<usize, Tensor> = decided.into_iter().collect();
        let length = |part: &RankPart| if number { 1 } else { part.place.elements() };
        for dtype in self.dtypes() {
            let (mut sent, mut wanted) = (vec![Vec::new(); self.comm.size()], vec![0; self.comm.size()]);
            for (at, cut) in self.of_dtype(dtype) {
                let Some((index, _)) = self.here[at] else { continue };
                for part in cut.parts.iter().filter(|_| cut.owner == me) {
                    sent[part.rank].push(match decided.get(&index) {
                        Some(number_or_whole) if number => number_or_whole.clone(),
                        Some(whole) => part_of(whole, &part.place)?,
                        None => Tensor::zeros(&[length(part)], dtype, self.device)?,
                    });
                    sent[part.rank].extend(state[index].iter().cloned());
                }
                let shared: usize = state[index].iter().map(Tensor::numel).sum();
                wanted[cut.owner] += own_part(cut, me).map_or(0, |part| length(part) + shared);
            }
            let mut received = self.all_to_all(dtype, &sent, &wanted)?;
            for (at, cut) in self.of_dtype(dtype) {
                let (Some((index, device)), Some(part)) = (self.here[at], own_part(cut, me)) else {
                    continue;
                };
                let from = &mut received[cut.owner];
                found.push((index, take_front(from, length(part))?.to_device(device, false)?));
                for held in &mut state[index] {
                    let values = take_front(from, held.numel())?.to_device(device, false)?;
                    kernels::copy_(held, &values.with_shape(held.shape())?)?;
                }
            }
        }
        Ok(found)
    }
}

impl WholeExchange for Exchange {
    fn is_cut(&self, index: usize) -> bool {
        self.numbers.get(index).is_some_and(Option::is_some)
    }

    fn collect(&self, each: usize, parts: &[Vec<Tensor>]) -> phalanx_nn::Result<Vec<(usize, Vec<Tensor>)>> {
        Exchange::collect(self, each, parts).map_err(nn_error)
    }

    fn distribute(
        &self,
        number: bool,
        decided: Vec<(usize, Tensor)>,
        state: &mut [Vec<Tensor>],
    ) -> phalanx_nn::Result<Vec<(usize, Tensor)>> {
        Exchange::distribute(self, number, decided, state).map_err(nn_error)
    }
}

fn own_part(cut: &CutParameter, rank: usize) -> Option<&RankPart> {
    cut.parts.iter().find(|part| part.rank == rank)
}

/// Removes the first elements and returns them.
fn take_front(rest: &mut Tensor, count: usize) -> Result<Tensor> {
    let front = rest.narrow(0, 0, count)?;
    *rest = rest.narrow(0, count, rest.numel() - count)?;
    Ok(front)
}

/// The whole tensors of a parameter, of the elements that each rank has sent, which are taken.
fn assemble(cut: &CutParameter, each: usize, device: Device, received: &mut [Tensor]) -> Result<Vec<Tensor>> {
    let shape = &cut.parts[0].place.shape;
    let make = |shape: &[usize]| {
        (0..each).map(|_| Ok(Tensor::empty(shape, cut.dtype, device)?)).collect::<Result<Vec<_>>>()
    };
    let mut boxes: Vec<(&BoxRange, Vec<Tensor>)> = Vec::new();
    for RankPart { rank, place, .. } in cut.parts.iter().filter(|part| part.sends) {
        let known = boxes.iter().position(|(other, _)| other.offset == place.offset);
        let at = known.unwrap_or(boxes.len());
        if known.is_none() {
            boxes.push((place, make(&[place.extent.iter().product()])?));
        }
        for tensor in &boxes[at].1 {
            let values = take_front(&mut received[*rank], place.elements())?;
            kernels::copy_(&mut tensor.narrow(0, place.range.start, place.elements())?, &values)?;
        }
    }
    if let [(place, _)] = boxes[..]
        && place.extent == *shape
    {
        return Ok(boxes.swap_remove(0).1);
    }
    let whole = make(shape)?;
    for (place, tensors) in &boxes {
        for (tensor, whole) in tensors.iter().zip(&whole) {
            kernels::copy_(&mut shard_of(place).of(whole)?, &tensor.with_shape(&place.extent)?)?;
        }
    }
    Ok(whole)
}

/// A part of a whole tensor, in one dimension.
fn part_of(whole: &Tensor, place: &BoxRange) -> Result<Tensor> {
    let shard = shard_of(place).of(whole)?.contiguous()?;
    Ok(shard.with_shape(&[shard.numel()])?.narrow(0, place.range.start, place.elements())?)
}

fn shard_of(place: &BoxRange) -> Shard {
    let [global, offset, extent] = [&place.shape, &place.offset, &place.extent].map(|d| Dims::from_slice(d));
    Shard { window: Window { global, offset }, extent }
}

#[cfg(test)]
mod tests {
    use std::ops::Range;

    use super::*;

    fn held(
        name: &str,
        shape: &[usize],
        offset: &[usize],
        extent: &[usize],
        range: Range<usize>,
    ) -> HeldPart {
        let place = BoxRange { shape: shape.into(), offset: offset.into(), extent: extent.into(), range };
        HeldPart { name: name.into(), place, wide: false }
    }

    #[test]
    fn cut_parameters_go_to_the_holder_that_owns_least() {
        let half = |name: &str, row: usize| held(name, &[2, 8], &[row, 0], &[1, 8], 0..8);
        let whole = held("norm", &[3], &[0], &[3], 0..3);
        let ranks = [
            vec![half("b", 0), whole.clone(), half("a", 0)],
            vec![half("b", 1), whole, half("a", 1), held("c", &[4], &[0], &[4], 0..2)],
            vec![held("c", &[4], &[0], &[4], 2..4)],
        ];
        let cut = plan(&ranks).unwrap();
        let owners: Vec<_> = cut.iter().map(|cut| (cut.name.as_str(), cut.owner)).collect();
        assert_eq!(owners, [("a", 0), ("b", 1), ("c", 2)]);
        assert!(cut.iter().flat_map(|cut| &cut.parts).all(|part| part.sends));
    }

    #[test]
    fn of_two_ranks_with_one_part_the_first_sends_it_and_missing_elements_are_an_error() {
        let half = |start: usize| held("w", &[4], &[0], &[4], start..start + 2);
        let cut = plan(&[vec![half(0)], vec![half(0)], vec![half(2)]]).unwrap();
        let sends: Vec<bool> = cut[0].parts.iter().map(|part| part.sends).collect();
        assert_eq!(sends, [true, false, true]);
        let error = plan(&[vec![half(0)], vec![half(0)]]).unwrap_err().to_string();
        assert!(error.contains("w: ") && error.contains("all its elements"), "{error}");
    }
}
