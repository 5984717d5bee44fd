"""Cost formulas of single operators, one file per kind; `partita.cost.formulas` looks them up by name."""
