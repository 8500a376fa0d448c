//! Layers without parameters that move elements: padding, unfolding, pixel shuffles, resizing.

use phalanx_autograd::{FoldOptions, Interpolate, PadMode, Var};

use crate::{Entry, Module, Parameters, Result};

macro_rules! layers {
    ($($(#[$doc:meta])* $name:ident { $($(#[$field_doc:meta])* $field:ident: $type:ty),* }, |$self:ident, $x:ident| $forward:expr;)*) => {$(
        $(#[$doc])*
        #[derive(Clone, Debug, PartialEq)]
        pub struct $name {
            $($(#[$field_doc])* pub $field: $type,)*
        }

        impl Parameters for $name {
            fn visit(&self, _: &str, _: &mut dyn FnMut(&str, Entry<'_>)) {}
        }

        impl Module for $name {
            fn forward(&$self, $x: &Var) -> Result<Var> {
                Ok($forward?)
            }
        }
    )*};
}

layers! {
    /// `[N, C, ..]` with other sizes; see [`Var::interpolate`].
    Upsample {
        /// The sizes or factors, and the mode.
        options: Interpolate
    }, |self, x| x.interpolate(&self.options);
    /// `[.., C r², H, W]` to `[.., C, H r, W r]`; see [`Var::pixel_shuffle`].
    PixelShuffle {
        /// The factor `r`.
        factor: usize
    }, |self, x| x.pixel_shuffle(self.factor);
    /// `[.., C, H r, W r]` to `[.., C r², H, W]`; see [`Var::pixel_unshuffle`].
    PixelUnshuffle {
        /// The factor `r`.
        factor: usize
    }, |self, x| x.pixel_unshuffle(self.factor);
    /// The windows of images as columns; see [`Var::unfold`].
    Unfold {
        /// The windows.
        options: FoldOptions
    }, |self, x| x.unfold(&self.options);
    /// Columns added up to images; see [`Var::fold`].
    Fold {
        /// Height and width of the images.
        size: [usize; 2],
        /// The windows.
        options: FoldOptions
    }, |self, x| x.fold(self.size, &self.options);
    /// Margins of zeros. `margins[i]` is `(before, after)` of dimension `rank - 1 - i`, as for [`Var::pad`].
    ZeroPad {
        /// The margins; negative ones crop.
        margins: Vec<(isize, isize)>
    }, |self, x| x.pad(&self.margins, 0.0);
    /// Margins of a number; the margins are those of [`ZeroPad`].
    ConstantPad {
        /// The margins; negative ones crop.
        margins: Vec<(isize, isize)>,
        /// The number.
        value: f64
    }, |self, x| x.pad(&self.margins, self.value);
    /// Margins that mirror the elements; the margins are those of [`ZeroPad`].
    ReflectionPad {
        /// The margins; negative ones crop.
        margins: Vec<(isize, isize)>
    }, |self, x| x.pad_mode(&self.margins, PadMode::Reflect);
    /// Margins that repeat the outermost element; the margins are those of [`ZeroPad`].
    ReplicationPad {
        /// The margins; negative ones crop.
        margins: Vec<(isize, isize)>
    }, |self, x| x.pad_mode(&self.margins, PadMode::Replicate);
    /// Margins of the elements at the other end; the margins are those of [`ZeroPad`].
    CircularPad {
        /// The margins; negative ones crop.
        margins: Vec<(isize, isize)>
    }, |self, x| x.pad_mode(&self.margins, PadMode::Circular);
    /// Each element over a power of the mean square of its neighbours in other channels; see [`Var::local_response_norm`].
    LocalResponseNorm {
        /// Channels of a window.
        size: usize,
        /// The factor of the mean, usually 1e-4.
        alpha: f64,
        /// The power, usually 0.75.
        beta: f64,
        /// What is added to the mean, usually 1.
        k: f64
    }, |self, x| x.local_response_norm(self.size, self.alpha, self.beta, self.k);
}
