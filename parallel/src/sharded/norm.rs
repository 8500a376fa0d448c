//! The gradients' norm when every rank has a part of them: nodes of the tree of [`phalanx_nn::norm_tree`] are exchanged.

use phalanx_kernels as kernels;
use phalanx_nn::norm_tree::{TreeNode, cover, nodes, root};
use phalanx_nn::{Parameter, Square};
use phalanx_tensor::{DType, Tensor};

use super::core::Core;
use super::flat::Flat;
use crate::Result;
use crate::comm::Call;

/// The sum of the squares of each trained parameter's gradient, by name, on all ranks. On a `meta` device there are none.
pub(super) fn grad_squares(core: &Core) -> Result<Vec<Square>> {
    let state = core.lock();
    let flats: Vec<&Flat> = state.groups.iter().flat_map(|g| &g.flats).filter(|f| f.trained).collect();
    let Some(device) = flats.first().map(|flat| flat.device()).filter(|device| !device.is_meta()) else {
        return Ok(Vec::new());
    };
    let device = device.host();
    let comm = &core.ranks.shard;
    let covers: Vec<Vec<Cover>> = (0..comm.size()).map(|rank| cover_of(&flats, rank)).collect();
    let mut own = Vec::new();
    for (piece, part) in flats.iter().flat_map(|f| &f.pieces).zip(&covers[comm.rank()]) {
        match piece.finish_grad()? {
            Some(grad) => {
                let blocks = kernels::sum_of_squares_blocks(&grad)?;
                own.extend(nodes(part.first, &blocks).into_iter().map(|node| node.sum));
            }
            None => own.resize(own.len() + part.nodes.len(), 0.0),
        }
    }
    let counts: Vec<usize> = covers.iter().map(|c| c.iter().map(|c| c.nodes.len()).sum()).collect();
    let all = Tensor::zeros(&[counts.iter().sum()], DType::F64, device)?;
    let own = Tensor::from_slice(&own, &[own.len()], device)?;
    comm.run(Call::all_gather_uneven(all.clone(), own, &counts))?;
    let mut sums = all.to_vec::<f64>()?.into_iter();
    // By name, then parameter.
    let members = flats.iter().flat_map(|f| &f.members);
    let mut parameters: Vec<(&Parameter, u64, Vec<TreeNode>)> =
        members.map(|m| (&m.parameter, blocks(m.range.len()), Vec::new())).collect();
    for part in covers.iter().flatten() {
        let sums = sums.by_ref().take(part.nodes.len());
        let nodes = part.nodes.iter().zip(sums).map(|(&(level, index), sum)| TreeNode { level, index, sum });
        parameters[part.parameter].2.extend(nodes);
    }
    parameters.sort_by(|a, b| a.0.name().cmp(b.0.name()));
    let square = |(parameter, total, nodes): (&Parameter, u64, Vec<TreeNode>)| {
        let (name, whole) = (parameter.name().to_string(), parameter.part().is_whole());
        Square { name, sum: root(nodes, total), whole }
    };
    Ok(parameters.into_iter().map(square).collect())
}

/// The nodes that cover a rank's part of a parameter.
struct Cover {
    parameter: usize,
    first: u64,
    nodes: Vec<(u32, u64)>,
}

fn cover_of(flats: &[&Flat], rank: usize) -> Vec<Cover> {
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
