//! The contract that every store and stage keeps, as tests that each of them
//! runs.
