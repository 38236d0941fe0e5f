//! The program `holdfast`.

fn main() {}
