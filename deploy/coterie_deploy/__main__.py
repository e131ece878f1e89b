"""`python -m coterie_deploy` is `coterie`."""

from coterie_deploy.cli import main

if __name__ == "__main__":
    main()
