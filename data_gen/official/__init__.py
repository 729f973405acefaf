"""Import of the data that the official SpecDec++ code makes."""
