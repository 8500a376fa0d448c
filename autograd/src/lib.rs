//! The graph: variables, nodes, the backward engine, hooks and recomputation.
