//! A product whose parts fit together.

use crate::call::{Result, Status};
use crate::description::Description;
use crate::element::{Inputs, Kind};
use crate::layout::Layout;

/// What is computed: shapes and types are checked, addresses are not known yet.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Plan {
    pub description: Description,
    pub a: Layout,
    pub b: Layout,
    pub c: Layout,
    pub d: Layout,
    /// D is m x n, op(A) is m x k, op(B) is k x n.
    pub m: usize,
    pub n: usize,
    pub k: usize,
}

impl Plan {
    /// # Errors
    /// Shapes that do not fit, or what is not emulated.
    pub(crate) fn new(description: Description, [a, b, c, d]: [Layout; 4]) -> Result<Plan> {
        let shape = |layout: &Layout, transposed| match transposed {
            false => (layout.rows, layout.columns),
            true => (layout.columns, layout.rows),
        };
        let ((m, k), (k_b, n)) = (shape(&a, description.transposed[0]), shape(&b, description.transposed[1]));
        if k != k_b || (m, n) != (d.rows, d.columns) || (c.rows, c.columns) != (d.rows, d.columns) {
            return Err(Status::INVALID_VALUE.because(format!(
                "op(A) is {m} x {k}, op(B) is {k_b} x {n}, C is {} x {}, D is {} x {}",
                c.rows, c.columns, d.rows, d.columns
            )));
        }
        let counts = [a.batches, b.batches, c.batches, d.batches];
        if counts.iter().any(|count| *count != d.batches || *count == 0) {
            return Err(
                Status::INVALID_VALUE.because(format!("batch counts of A, B, C and D are {counts:?}"))
            );
        }
        let plan = Plan { description, a, b, c, d, m, n, k };
        plan.check_types()?;
        plan.check_epilogue()?;
        Ok(plan)
    }

    fn check_types(&self) -> Result<()> {
        let Description { double, scale, inputs, .. } = self.description;
        let (a, b, c, d) = (self.a.kind, self.b.kind, self.c.kind, self.d.kind);
        let results = match a {
            Kind::F64 => double && d == Kind::F64,
            Kind::F32 => !double && d == Kind::F32,
            narrow => !double && (d == narrow || d == Kind::F32) && inputs == Inputs::AsTheyAre,
        };
        let scales = scale == if double { Kind::F64 } else { Kind::F32 };
        if a == b && c == d && results && scales {
            return Ok(());
        }
        Err(Status::NOT_SUPPORTED.because(format!(
            "A is {a:?}, B is {b:?}, C is {c:?}, D is {d:?}, alpha and beta are {scale:?}, computed in {}",
            if double { "f64" } else { "f32" }
        )))
    }

    fn check_epilogue(&self) -> Result<()> {
        let Description { epilogue, aux_leading, .. } = self.description;
        if !epilogue.is_default() && self.d.by_rows {
            return Err(
                Status::NOT_SUPPORTED.because("an epilogue for a D that lies in rows is not emulated")
            );
        }
        if epilogue.uses_aux() && (aux_leading < self.m || !aux_leading.is_multiple_of(8)) {
            let why =
                format!("aux has a leading dimension of {aux_leading}: a multiple of 8 from {} on", self.m);
            return Err(Status::INVALID_VALUE.because(why));
        }
        Ok(())
    }

    /// How aux lies.
    pub(crate) fn aux(&self) -> Layout {
        let d = &self.description;
        Layout {
            kind: d.aux_kind.unwrap_or(self.d.kind),
            leading: d.aux_leading,
            batch_stride: d.aux_stride,
            ..self.d
        }
    }

    /// How the bias lies: one column, of D's rows or, for op(B)'s sums, of its columns.
    pub(crate) fn bias(&self) -> Layout {
        let d = &self.description;
        let rows = if d.epilogue.bias == crate::epilogue::Bias::GradientOfB { self.n } else { self.m };
        let kind = d.bias_kind.unwrap_or(self.d.kind);
        Layout {
            kind,
            by_rows: false,
            rows,
            columns: 1,
            leading: rows,
            batch_stride: d.bias_stride,
            ..self.d
        }
    }
}
