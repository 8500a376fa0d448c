//! The gradients' norm when every rank has a part of them: ranks exchange nodes of the tree of [`phalanx_nn::norm_tree`].

use phalanx_kernels as kernels;
use phalanx_kernels::Stretches;
use phalanx_nn::norm_tree::{cover, joins};
use phalanx_nn::{Square, Squares};
use phalanx_tensor::{DType, Device, Tensor};

use super::core::ZeroCore;
use super::flat_parameter::{FlatParameter, Member};
use crate::Result;
use crate::all_gather::gather_sums;

/// Each parameter's sum of squares, on all ranks. On a `meta` device there are none.
pub(super) fn grad_squares(core: &ZeroCore) -> Result<Squares> {
    let state = core.lock();
    let flats: Vec<&FlatParameter> =
        state.units.iter().flat_map(|unit| &unit.flats).filter(|f| f.trained).collect();
    let device = flats.first().map_or(Device::CPU, |flat| flat.device());
    if flats.is_empty() || device.is_meta() {
        return Ok(Squares { of: Vec::new(), sums: Tensor::empty(&[0], DType::F64, device)? });
    }
    let comm = &core.ranks.shard;
    let covers: Vec<Vec<Cover>> = (0..comm.size()).map(|rank| cover_of(&flats, rank)).collect();
    let own = own_sums(device, &flats, &covers[comm.rank()])?;
    let counts: Vec<usize> = covers.iter().map(|c| c.iter().map(|c| c.nodes.len()).sum()).collect();

    let mut members: Vec<(usize, &Member)> =
        flats.iter().flat_map(|flat| &flat.members).enumerate().collect();
    let (mut nodes, mut places) = (vec![Vec::new(); members.len()], vec![Vec::new(); members.len()]);
    let all = covers.iter().flatten().flat_map(|part| part.nodes.iter().map(|node| (part.parameter, *node)));
    for (place, (parameter, node)) in all.enumerate() {
        nodes[parameter].push(node);
        places[parameter].push(place);
    }
    members.sort_by(|a, b| a.1.parameter.name().cmp(b.1.parameter.name()));
    let (count, mut pairs) = (members.len(), Vec::new());
    for (to, &(number, member)) in members.iter().enumerate() {
        let (joined, root) = joins(&nodes[number], blocks(member.range.len()));
        let place = |node: usize| places[number][node];
        pairs.extend(joined.into_iter().map(|(left, right)| (count + place(left), place(right))));
        pairs.extend(root.map(|root| (to, place(root))));
    }
    let square = |&(_, Member { parameter, .. }): &(usize, &Member)| Square {
        name: parameter.name().to_string(),
        whole: parameter.part().is_whole(),
    };
    let of = members.iter().map(square).collect();
    Ok(Squares { of, sums: gather_sums(comm, &own, &counts, count, pairs)? })
}

/// The sums of this rank's nodes, on `device`.
fn own_sums(device: Device, flats: &[&FlatParameter], covers: &[Cover]) -> Result<Tensor> {
    let (mut of, mut home): (Vec<Stretches>, _) = (Vec::new(), device);
    for (piece, Cover { first, nodes, .. }) in flats.iter().flat_map(|f| &f.pieces).zip(covers) {
        // Pieces are all on the device of the shards.
        home = piece.device();
        let node = |&(level, index): &(u32, u64)| {
            let start = ((index << level) - first) as usize;
            start..start + (1 << level)
        };
        of.push(match piece.finish_grad()? {
            Some(grad) => (grad, nodes.iter().map(node).collect()),
            None => (Tensor::empty(&[0], piece.dtype(), home)?, vec![0..0; nodes.len()]),
        });
    }
    Ok(kernels::sums_of_squares(home, &of)?.to_device(device, false)?)
}

/// The nodes that cover a rank's part of a parameter.
struct Cover {
    parameter: usize,
    first: u64,
    nodes: Vec<(u32, u64)>,
}

fn cover_of(flats: &[&FlatParameter], rank: usize) -> Vec<Cover> {
    let members = flats.iter().flat_map(|flat| flat.members.iter().map(|m| (m, flat.cuts.range(rank))));
    let covered = members.enumerate().filter_map(|(parameter, (member, part))| {
        let inside = member.inside(&part)?;
        let first = (inside.start / kernels::NORM_BLOCK) as u64;
        Some(Cover { parameter, first, nodes: cover(first, blocks(inside.len())) })
    });
    covered.collect()
}

fn blocks(elements: usize) -> u64 {
    elements.div_ceil(kernels::NORM_BLOCK) as u64
}
