"""The output of generations, from tokens to text: detokenizing, stop strings, choices."""
