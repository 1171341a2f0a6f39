"""What a sequence carries between tokens: pages of keys and values, recurrent blocks, its length."""
