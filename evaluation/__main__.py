"""`python -m evaluation COMMAND`, which is `acceptance-heads COMMAND`: record and replay traces, compare, tune."""

from configs.front import main

if __name__ == "__main__":
    main()
