//! [`Selection`]: the experts of a model that ranks divide, or the rest of it, as a model. Each has a data-parallel wrapper of its own, since other
//! ranks have copies of it.

use phalanx_nn::{AnyUnit, Entry, Parameter, Parameters};

/// A part of a model's tensors, as a model.
pub struct Selection<'a, M: ?Sized> {
    model: &'a M,
    experts: bool,
}

/// The experts that ranks divide: the parameters with a site for each replica. They keep the model's units, so ZeRO gathers and sends those of one
/// unit together, beside what else the unit has.
pub fn divided_experts<M: Parameters + ?Sized>(model: &M) -> Selection<'_, M> {
    Selection { model, experts: true }
}

/// Everything else: what every replica has whole, or split by other axes.
pub fn without_divided_experts<M: Parameters + ?Sized>(model: &M) -> Selection<'_, M> {
    Selection { model, experts: false }
}

impl<M: Parameters + ?Sized> Parameters for Selection<'_, M> {
    fn visit(&self, path: &str, visitor: &mut dyn FnMut(&str, Entry<'_>)) {
        self.model.visit(path, &mut |path, entry| {
            let is_expert = matches!(entry, Entry::Parameter(p) if p.has_replica_sites());
            if is_expert == self.experts {
                visitor(path, entry);
            }
        });
    }

    fn visit_units(&self, visitor: &mut dyn FnMut(&dyn AnyUnit)) {
        self.model.visit_units(visitor);
    }

    fn borrowed(&self) -> Vec<Parameter> {
        if self.experts { Vec::new() } else { self.model.borrowed() }
    }
}
