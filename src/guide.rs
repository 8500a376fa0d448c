//! A guide: one page a task, each a program that runs, with PyTorch's lines beside ours.
//!
//! | page | what it shows |
//! |---|---|
//! | [`classifier`] | a convolution net with a validation split, dropout, evaluation, saved weights |
//! | [`recurrent`] | an LSTM that continues a text, trained by truncated backpropagation through time |
//! | [`function`] | an operation of your own with its derivative, checked, and a Hessian-vector product |
//! | [`two_ranks`] | data parallelism |
//! | [`zero`] | fully sharded data parallelism |
//! | [`pipeline`] | a pipeline of your own layers over ranks |
//! | [`fine_tuning`] | a Hugging Face folder, trained further |
//! | [`generation`] | several prompts continued at once, with stop strings and a callback |
//!
//! Every page's program is compiled and run by the tests. They all begin with [`phalanx::prelude`](crate::prelude).

macro_rules! pages {
    ($($page:ident)*) => {$(
        #[doc = include_str!(concat!("../docs/guide/", stringify!($page), ".md"))]
        pub mod $page {}
    )*};
}

pages! { classifier recurrent function two_ranks zero pipeline fine_tuning generation }
