from doorbell_postgres.cli import main

main()
